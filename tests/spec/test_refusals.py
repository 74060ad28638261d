"""What a user can get wrong in a job (case H29, rows 68, 70 and 74), and what the refusal says."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rayway.errors import SpecError
from rayway.spec.load import load_job

Edit = Callable[[str, str], Path]
Write = Callable[..., Path]


def refusal(file: Path, *, config: tuple[Path, ...] = (), overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(SpecError) as caught:
        load_job(file, config=config, overrides=overrides)

    return str(caught.value)


# -- in the job file: old text, new text, line, what the message must hold


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("lr=0.1", "learning_rte=0.1", 19, ["optim.learning_rte", "nearest valid key is optim.lr"]),
        ("lr=0.1", "learning_rate=0.1", 19, ["optim.learning_rate", "optim.lr"]),
        ("steps=12", "steps=12, warmup_stps=3", 20, ["optim.warmup_stps", "optim.warmup_steps"]),
        ("    loss=loss,", "    loss=loss, lr=0.1,", 15, ["key lr", "top level", "optim.lr"]),
        ("    loss=loss,", "    loss=loss, seeds=1,", 15, ["seeds", "seed"]),
        ("workers=2", "num_workers=2", 22, ["scale.num_workers", "scale.workers"]),
        ("workers=2", "global_batch=2", 22, ["does not belong in scale", "batch.global_batch"]),
        ("workers=2", "qqq=2", 22, ["scale.qqq", "valid keys", "gpus_per_worker"]),
        ("steps=12", 'steps="12"', 20, ["optim.steps='12'", "text", "Write 12 without quotes"]),
        ("steps=12", "steps=12.0", 20, ["optim.steps=12.0", "Write 12."]),
        ("steps=12", "steps=True", 20, ["optim.steps=True", "a whole number"]),
        ("lr=0.1", 'lr="1e-3"', 19, ["optim.lr='1e-3'", "Write 1e-3 without quotes"]),
        ("lr=0.1", "lr=float('nan')", 19, ["optim.lr=nan", "finite"]),
        ("lr=0.1", "lr=float('inf')", 19, ["optim.lr=inf", "finite"]),
        ("lr=0.1", "lr=-0.1", 19, ["optim.lr=-0.1", "more than 0"]),
        ("lr=0.1", "lr=1e9", 19, ["optim.lr=1000000000.0", "at most 1000"]),
        ("steps=12", "steps=0", 20, ["optim.steps=0", "at least 1"]),
        ("global_batch=8", "global_batch=10**30", 17, ["batch.global_batch=1", "at most"]),
        ("global_batch=8", "global_batch=-8", 17, ["batch.global_batch=-8", "at least 1"]),
        ("lr=0.1", "lr=0.1,\n        betas=(\n0.9,\n2.0)", 22, ["optim.betas.1=2.0"]),
        ('"layers": 2', '"layers": float("nan")', 13, ["model.args.layers=nan", "finite"]),
        ('"layers": 2', '"layers": (1, 2)', 13, ["model.args.layers", "tuple", "lists"]),
        ('"layers": 2', '"layers": 2,\n"layers": 3', 14, ["duplicate key 'layers'"]),
        ("lr=0.1,", "lr=0.1, lr=0.2,", 19, ["keyword argument repeated: lr"]),
        ("steps=12", "steps=12, epochs=1.0", 20, ["optim.steps=12", "optim.epochs=1", "Keep one"]),
        ("        steps=12,\n", "", 18, ["neither optim.steps nor optim.epochs"]),
        ("    loss=loss,\n", "", 9, ["loss is missing"]),
        ("loss=loss", "loss=lambda m, b: 0", 15, ["loss=", "a lambda"]),
        ("loss=loss", "loss='losses.mse'", 15, ["'losses.mse'", "module:name"]),
        ("loss=loss", "loss=3", 15, ["loss=3", "needs a function"]),
        ("OptimSpec(\n", "OptimSpec(0.1,\n", 18, ["OptimSpec takes its values by name only"]),
        ('DataSpec(train="rows/train")', "3", 16, ["data=3", "mapping"]),
        ('name="tiny"', 'name=3', 10, ["name=3", "Put it in quotes"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_job_file_is_named_with_its_line(
    edit: Edit, old: str, new: str, line: int, words: list[str]
) -> None:
    message = refusal(edit(old, new))
    assert message.startswith(f"jobs/tiny.py:{line}: ")
    assert all(word in message for word in words), message


def test_all_mistakes_of_a_section_are_named_at_once(edit: Edit) -> None:
    message = refusal(edit("steps=12", "steps='12',\n        shedule='cosine'"))
    assert [line[:16] for line in message.splitlines()] == ["jobs/tiny.py:21:", "jobs/tiny.py:20:"]


def test_a_misspelt_key_is_not_reported_a_second_time_as_missing(edit: Edit) -> None:
    assert "missing" not in refusal(edit("lr=0.1", "learning_rate=0.1"))


def test_a_section_made_before_the_job_is_named_where_it_was_made(edit: Edit) -> None:
    file = edit(
        "job = Job(", "sizes = dict(workers=-1)\nscale = ScaleSpec(\n    **sizes)\n\njob = Job("
    )
    assert refusal(file).startswith("jobs/tiny.py:10: scale.workers=-1")


def test_a_value_that_came_through_a_variable_is_named_where_it_is_handed_over(
    edit: Edit,
) -> None:
    file = edit("job = Job(", "warm = -1\n\njob = Job(")
    file.write_text(file.read_text().replace("steps=12", "steps=12,\n        warmup_steps=warm"))
    assert refusal(file).startswith("jobs/tiny.py:23: optim.warmup_steps=-1")


def test_a_mistake_in_a_module_of_the_user_is_named_there(write: Write, edit: Edit) -> None:
    write(
        "jobs/presets.py", "from rayway.spec.job import ScaleSpec\n\nscale = ScaleSpec(wrkers=1)\n"
    )
    file = edit("ScaleSpec(workers=2)", "__import__('presets').scale")
    assert refusal(file).startswith("jobs/presets.py:3: unknown key scale.wrkers")


# -- in a settings file


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("optim:\n  learning_rte: 0.1\n", 2, ["optim.learning_rte", "optim.lr"]),
        ("\n\nlearning_rte: 0.1\n", 3, ["learning_rte", "optim.lr"]),
        ("seed: 1\nlr: 0.1\n", 2, ["key lr", "top level", "optim.lr"]),
        ("optm:\n  lr: 0.1\n", 1, ["unknown key optm", "optim"]),
        ("optim.lr: 0.1\n", 1, ["optim.lr", "nested"]),
        ("scale:\n  every_steps: 1\n", 2, ["evaluate.every_steps or checkpoint.every_steps"]),
        ('optim:\n  steps: "12"\n', 2, ["optim.steps='12'", "without quotes"]),
        ("optim:\n  lr: 1\n  lr: 2\n", 3, ["duplicate key lr", "line 2"]),
        ("seed: 1\nscale: {workers: 2}\nseed: 2\n", 3, ["duplicate key seed", "line 1"]),
        ("model: {args: {a: 1,\n  a: 2}}\n", 2, ["duplicate key a"]),
        ("optim:\n  lr: .nan\n", 2, ["optim.lr=nan", "finite"]),
        ("optim:\n  lr: 1e999\n", 2, ["optim.lr=inf", "finite"]),
        ("optim:\n  lr: -1\n", 2, ["optim.lr=-1"]),
        ("data:\n  shuffle: yes\n", 2, ["data.shuffle='yes'", "true or false"]),
        ("optim:\n  max_norm: None\n", 2, ["'None'", "write null"]),
        ("optim:\n", 1, ["optim", "empty"]),
        ("optim: [1, 2]\n", 1, ["optim=[1, 2] is a list"]),
        ("precision: fp31\n", 1, ["fp32 or bf16", "nearest is fp32"]),
        ("seed: !!python/object/apply:os.system [echo]\n", 1, ["tag"]),
        ("seed: &a 1\n", 1, ["anchors"]),
        ("optim: *a\n", 1, ["aliases"]),
        ("optim:\n  <<: {lr: 1}\n", 2, ["'<<'"]),
        ("- 1\n", 1, ["names with values"]),
        ("seed: 1\n---\nseed: 2\n", 2, ["not YAML"]),
        ("optim:\n\tlr: 1\n", 2, ["not YAML"]),
        ("optim: {lr: 1\nseed: 2", 2, ["not YAML"]),
    ],
)
def test_a_mistake_in_a_settings_file_is_named_with_its_line(
    write: Write, text: str, line: int, words: list[str]
) -> None:
    message = refusal(write(), config=(write("f.yaml", text),))
    assert message.startswith(f"f.yaml:{line}: ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", ".001", "+1e-3"])
def test_yaml_numbers_are_numbers(write: Write, text: str) -> None:
    config = write("f.yaml", f"optim:\n  lr: {text}\n")
    assert load_job(write(), config=[config]).job.optim.lr == 1e-3
    assert load_job(write(), overrides=[f"optim.lr={text}"]).job.optim.lr == 1e-3


def test_an_alias_bomb_is_refused_before_it_goes_off(write: Write) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    bomb = write("bomb.yaml", "\n".join(["a0: &a0 [x, x]", *levels]))
    began = time.perf_counter()
    assert "bomb.yaml:1: anchors" in refusal(write(), config=(bomb,))
    assert time.perf_counter() - began < 2


# -- on the command line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.learning_rte=0.1", ["--set", "optim.learning_rte", "optim.lr"]),
        ("lr=0.1", ["--set", "key lr", "optim.lr"]),
        ("foo.bar=1", ["--set", "foo"]),
        ("optim.steps='12'", ["optim.steps='12'", "without quotes"]),
        ("optim.lr", ["FIELD=VALUE"]),
        ("=1", ["FIELD=VALUE"]),
        ("optim..lr=1", ["FIELD=VALUE"]),
        ("optim.lr=", ["no value"]),
        ("optim.lr=[1", ["not YAML"]),
        ("optim.lr.x=1", ["optim.lr", "no fields"]),
        ("optim=null", ["optim", "mapping"]),
        ("seed=99999999999999999999", ["seed", "less than"]),
        ("seed=" + "9" * 5000, ["seed", "5000 digits"]),
        ("model.args.x=" + "[" * 100 + "]" * 100, ["nested"]),
    ],
)
def test_a_mistake_in_an_override_is_named(write: Write, override: str, words: list[str]) -> None:
    message = refusal(write(), overrides=(override,))
    assert message.startswith("--set")
    assert all(word in message for word in words), message


def test_the_same_field_set_twice_is_a_duplicate_key(write: Write) -> None:
    assert "set twice" in refusal(write(), overrides=("optim.lr=1", "optim.lr=2"))


# -- fault row 70


def test_a_batch_that_does_not_split_is_refused_with_where_it_comes_from(write: Write) -> None:
    message = refusal(write(), overrides=("scale.workers=3",))
    assert message.startswith("jobs/tiny.py:17: batch.global_batch=8")
    assert "Use 6 or 9" in message
    assert "scale.workers=3 is from: --set" in message


# -- fault row 74


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 300,
        "..",
        ".",
        "a/b",
        "/",
        "é",
        "A",
        "a b",
        "-a",
        "a\n",
        "a\0",
        "nul",
        "com1.x",
        "a.",
    ],
)
def test_a_name_that_cannot_be_a_folder_is_refused(edit: Edit, name: str) -> None:
    message = refusal(edit('"tiny"', ascii(name)))
    assert message.startswith("jobs/tiny.py:10: name=")
    assert "name" in message.partition("name=")[2]


@pytest.mark.parametrize("name", ["a", "0", "tiny-lm_2.b", "a" * 63, "console", "a..b"])
def test_a_plain_name_is_taken(edit: Edit, name: str) -> None:
    assert load_job(edit('"tiny"', ascii(name))).job.name == name


# -- before anything expensive


def test_a_refused_key_takes_less_than_two_seconds_and_starts_neither_torch_nor_ray(
    edit: Edit,
) -> None:
    file = edit("lr=0.1", "learning_rte=0.1")
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from rayway.errors import SpecError
        from rayway.spec.load import load_job
        try:
            load_job(Path(sys.argv[1]))
        except SpecError as error:
            print(error)
        print(sorted({"torch", "ray", "numpy", "pyarrow"} & sys.modules.keys()))
    """)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    assert time.perf_counter() - began < 2
    message, loaded = done.stdout.splitlines()
    assert message.startswith("jobs/tiny.py:19: unknown key optim.learning_rte")
    assert loaded == "[]"
