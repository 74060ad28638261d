import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import SpecError
from rayway.spec.callsite import display
from rayway.spec.job import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    Job,
    ModelSpec,
    OptimSpec,
    ScaleSpec,
)
from rayway.spec.load import (
    Resolved,
    check_user_code,
    import_object,
    job_from_json,
    job_hash,
    job_to_json,
    load_job,
    resolve_job,
)

Write = Callable[..., Path]
Edit = Callable[[str, str], Path]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
paths = st.from_regex(r"[a-z]{1,5}(\.[a-z]{1,5})?:[a-z_]{1,5}", fullmatch=True)
steps = st.integers(1, 10**6)

jobs = st.builds(
    Job,
    name=st.from_regex(r"[a-z][a-z0-9_-]{3,40}", fullmatch=True),
    model=st.builds(
        ModelSpec, build=paths, args=st.dictionaries(st.text(max_size=5), json_values, max_size=3)
    ),
    loss=paths,
    data=st.builds(
        DataSpec,
        train=st.just("/rows"),
        validation=st.just("s3://b/rows"),
        columns=st.none() | st.lists(st.text(min_size=1), min_size=1, unique=True).map(tuple),
        transform=st.none() | paths,
        cover=st.sampled_from(["drop", "all"]),
        shuffle=st.booleans(),
    ),
    batch=st.builds(
        BatchSpec,
        global_batch=st.integers(64, 4096),
        micro_batch=st.none() | st.integers(1, 64),
    ),
    optim=st.builds(
        OptimSpec,
        lr=st.floats(1e-12, 1000),
        betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        max_norm=st.none() | st.floats(1e-6, 1e6),
        epochs=st.floats(0.01, 1000),
    ),
    evaluate=st.builds(EvaluateSpec, every_steps=st.none() | steps),
    checkpoint=st.builds(
        CheckpointSpec, every_steps=st.none() | steps, keep_last=st.integers(1, 9)
    ),
    scale=st.builds(ScaleSpec, workers=st.integers(0, 64), start_timeout_s=st.floats(0.1, 1000)),
    precision=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 2**63 - 1),
    trace=st.booleans(),
)  # fmt: skip


def resolved(job: Job) -> Resolved:
    root = Path("/jobs")
    return Resolved(job=job, origins={"seed": "--set"}, job_file=root / "x.py", code_root=root)


# -- job.json


@given(jobs)
def test_a_job_comes_back_from_its_json_unchanged(job: Job) -> None:
    before = resolved(job)
    assert job_from_json(job_to_json(before)) == before
    assert job_hash(job_from_json(job_to_json(before)).job) == job_hash(job)


def test_the_hash_depends_on_every_value_but_not_on_the_order_of_arguments(job: Job) -> None:
    def with_args(**args: Any) -> Job:
        return job.model_copy(update={"model": ModelSpec(build="m:b", args=args)})

    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"name": "other"}, {"trace": True}]
    others = [job.model_copy(update=change) for change in changes]
    others += [with_args(a=1), with_args(a=2), with_args(a=1.5), with_args(a=True)]
    assert len({job_hash(other) for other in others}) == len(others)
    assert job_hash(with_args(a=1, b=2)) == job_hash(with_args(b=2, a=1))


def test_the_hash_is_the_same_in_every_process(job: Job) -> None:
    program = (
        "import sys; from rayway.spec.load import job_from_json, job_hash\n"
        "print(job_hash(job_from_json(sys.argv[1]).job))"
    )
    text = job_to_json(resolved(job))
    done = subprocess.run(
        [sys.executable, "-c", program, text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == job_hash(job)


def test_a_loaded_job_comes_back_with_its_origins(write: Write) -> None:
    before = load_job(write(), overrides=["seed=7", "model.args.w=[1, {a: null}]"])
    assert job_from_json(job_to_json(before)) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r | {"schema": 2}, "schema 2; this rayway reads 1"),
        (lambda r: {}, "schema None"),
        (lambda r: [], "schema None"),
        (lambda r: r | {"job": 3}, "is missing"),
        (lambda r: r | {"origins": None}, "is missing"),
        (lambda r: r | {"job": r["job"] | {"sed": 1}}, "job.json: unknown key sed"),
        (lambda r: r | {"job": r["job"] | {"seed": "1"}}, "job.json: seed='1'"),
        (lambda r: r["job"].pop("loss") and r, "job: loss is missing"),
    ],
)
def test_a_json_that_is_no_job_is_refused(
    job: Job, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    record = json.loads(job_to_json(resolved(job)))
    with pytest.raises(SpecError, match=words):
        job_from_json(json.dumps(change(record)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"schema": 1, "schema": 1}', "duplicate key schema"),
        ("\0", "Expecting value"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_damaged_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=rf"^job\.json: is not JSON: .*{words}"):
        job_from_json(text)


# -- layers from files


def test_values_come_from_defaults_job_file_config_and_set_in_this_order(write: Write) -> None:
    one = write("one.yaml", "seed: 1\noptim: {lr: 1e-1, weight_decay: 0.1}\nscale: {workers: 1}\n")
    two = write("two.yaml", "seed: 2\noptim:\n  lr: 2e-1\n")
    found = load_job(write(), config=[one, two], overrides=["seed=3"])
    job, origins = found.job, found.origins
    assert (job.seed, origins["seed"]) == (3, "--set")
    assert (job.optim.lr, origins["optim.lr"]) == (0.2, "two.yaml:3")
    assert (job.optim.weight_decay, origins["optim.weight_decay"]) == (0.1, "one.yaml:2")
    assert (job.scale.workers, origins["scale.workers"]) == (1, "one.yaml:3")
    assert (job.optim.steps, origins["optim.steps"]) == (12, "jobs/tiny.py:20")
    assert (job.precision, origins["precision"]) == ("fp32", "default")


def test_the_origin_of_a_spread_value_is_the_call(edit: Edit) -> None:
    found = load_job(edit("workers=2", "**{'workers': 1}"))
    assert found.origins["scale.workers"] == "jobs/tiny.py:22"


def test_the_origin_of_what_nobody_saw_being_made_is_the_line_of_job(edit: Edit) -> None:
    file = edit("job = Job(", "base = Job(")
    file.write_text(file.read_text() + "\njob = base.model_copy(update={'seed': 5})\n")
    found = load_job(file)
    assert (found.job.seed, found.origins["seed"]) == (5, "jobs/tiny.py:25")
    assert found.origins["optim.lr"] == "jobs/tiny.py:19"


def test_a_copy_with_a_wrong_value_is_refused_although_pydantic_does_not_look(edit: Edit) -> None:
    file = edit("job = Job(", "base = Job(")
    file.write_text(file.read_text() + "\njob = base.model_copy(update={'seed': 'x'})\n")
    with pytest.raises(SpecError, match=r"^jobs/tiny\.py:25: seed='x'"):
        load_job(file)


@pytest.mark.parametrize(
    ("given_path", "expected"),
    [
        ("rows/train", "{cwd}/rows/train"),
        ("./rows/../train", "{cwd}/train"),
        ("/rows/train", "/rows/train"),
        ("~/rows", "{home}/rows"),
        ("s3://bucket/rows", "s3://bucket/rows"),
        ("memory://rows", "memory://rows"),
        ("file:///rows", "file:///rows"),
        ("simplecache::s3://b/rows", "simplecache::s3://b/rows"),
    ],
)
def test_relative_data_paths_count_from_the_current_folder(
    edit: Edit, folder: Path, given_path: str, expected: str
) -> None:
    file = edit('"rows/train"', f'"rows", validation="{given_path}"')
    found = load_job(file)
    assert found.job.data.validation == expected.format(cwd=folder, home=Path.home())
    assert found.job.data.train == str(folder / "rows")
    assert found.origins["data.validation"] == "jobs/tiny.py:16"
    over = load_job(file, overrides=[f"data.train={given_path}"])
    assert over.job.data.train == found.job.data.validation


# -- the code root


def test_the_same_file_loaded_twice_is_seen_as_it_is_now(write: Write, edit: Edit) -> None:
    write("jobs/sizes_x.py", "LAYERS = 3")
    file = edit('{"layers": 2}', '{"layers": __import__("sizes_x").LAYERS}')
    assert load_job(file).job.model.args == {"layers": 3}
    write("jobs/sizes_x.py", "LAYERS = 4 + 5  # another size, as pyc files are told apart by it")
    assert load_job(file).job.model.args == {"layers": 9}


def test_two_job_files_with_modules_of_the_same_name_do_not_mix(write: Write, edit: Edit) -> None:
    text = edit('{"layers": 2}', '{"layers": __import__("sizes_x").LAYERS}').read_text()
    for folder, layers in (("one", 1), ("two", 2)):
        write(f"{folder}/sizes_x.py", f"LAYERS = {layers}")
        assert load_job(write(f"{folder}/tiny.py", text)).job.model.args == {"layers": layers}
        assert import_object("sizes_x:LAYERS") == layers


def test_a_file_that_fails_leaves_no_trace(write: Write) -> None:
    before = list(sys.path)
    with pytest.raises(SpecError):
        load_job(write(text="1 / 0"))
    assert sys.path == before
    assert "tiny" not in sys.modules


def test_the_files_own_functions_are_the_ones_that_were_run(write: Write) -> None:
    found = load_job(write())
    assert found.job.model.build == "tiny:build"
    assert import_object(found.job.model.build) is sys.modules["tiny"].build
    check_user_code(found)


def test_a_worker_imports_the_files_own_functions_with_the_code_root_alone(
    write: Write, folder: Path
) -> None:
    write("jobs/models_x.py", "def loss(model, batch): return 42")
    found = load_job(write(), overrides=["loss=models_x:loss"])
    (folder / "job.json").write_text(job_to_json(found))
    program = (
        "from pathlib import Path\n"
        "from rayway.spec.code import enter_code_root\n"
        "from rayway.spec.load import import_object, job_from_json\n"
        "found = job_from_json(Path('../job.json').read_text())\n"
        "enter_code_root(found.code_root)\n"
        "print(import_object(found.job.model.build)(**found.job.model.args))\n"
        "print(import_object(found.job.loss)(None, None))\n"
    )
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=elsewhere, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "42"]


def test_a_job_file_run_as_a_script_keeps_paths_that_workers_can_import(
    write: Write, folder: Path
) -> None:
    file = write()
    with file.open("a") as end:
        end.write(
            "if __name__ == '__main__':\n"
            "    from rayway.spec.load import job_to_json, resolve_job\n"
            "    print(job_to_json(resolve_job(job, overrides=['seed=5'])))\n"
        )
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
    found = job_from_json(done.stdout)
    assert (found.job.loss, found.code_root, found.job.seed) == ("tiny:loss", folder / "jobs", 5)
    assert found.origins["seed"] == "--set"


def test_a_job_made_in_a_program_is_resolved_from_there(job: Job) -> None:
    found = resolve_job(job)
    assert found.job == job
    assert found.job_file is None
    assert found.origins["optim.lr"].startswith(f"{display(__file__)}:")
    assert found.origins["seed"] == "default"


# -- the user's functions


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("models_y:build", "no module models_y. The nearest: models_x"),
        ("zzz:build", "no module zzz. It is looked for in "),
        ("models_x.tiny:build", "no module models_x.tiny. The nearest: models_x.tinny"),
        ("models_x.tinny:buid", "module models_x.tinny has no buid. The nearest: build"),
        ("models_x.tinny:zzz", "has no zzz. Define it there"),
        ("models_x.tinny.more:zzz", "no module models_x.tinny.more"),
        ("models_x.needs:build", "No module named 'not_installed_x'"),
        ("models_x.fails:build", "ZeroDivisionError"),
        ("models_x.typo:build", "SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_with_the_nearest(
    write: Write, path: str, words: str
) -> None:
    write("jobs/models_x/__init__.py", "")
    write("jobs/models_x/tinny.py", "def build(): ...")
    write("jobs/models_x/needs.py", "import not_installed_x")
    write("jobs/models_x/fails.py", "1 / 0")
    write("jobs/models_x/typo.py", "def build(:")
    found = load_job(write(), overrides=[f"model.build={path}"])
    with pytest.raises(SpecError) as caught:
        import_object(path)
    assert words in str(caught.value)
    assert "importlib" not in str(caught.value)
    with pytest.raises(SpecError) as caught:
        check_user_code(found)
    assert str(caught.value).startswith(f"--set: model.build={path}: ")


def test_what_is_no_function_is_refused(write: Write) -> None:
    write("jobs/models_x.py", "build = 3")
    found = load_job(write(), overrides=["optim.build=models_x:build"])
    with pytest.raises(SpecError, match=r"^--set: optim\.build=models_x:build is of type int"):
        check_user_code(found)


def test_a_path_may_lead_into_a_class_and_a_function_is_its_own_import() -> None:
    assert import_object("pathlib:Path.cwd")() == Path.cwd()
    assert import_object(len) is len


# -- nothing heavy


def test_the_whole_room_loads_in_well_under_half_a_second_without_torch_ray_or_numpy() -> None:
    program = (
        "import sys, time\n"
        "began = time.process_time()\n"
        "import rayway.spec.load, rayway.spec.describe\n"
        "print(time.process_time() - began)\n"
        "print(sorted({'torch', 'ray', 'numpy', 'pyarrow', 'fsspec'} & sys.modules.keys()))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert {run.stdout.split()[1] for run in runs} == {"[]"}
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.5


def test_a_resolved_job_cannot_be_changed(job: Job) -> None:
    found = resolved(job)
    assert replace(found, job_file=None) != found
    with pytest.raises(AttributeError):
        found.job = job  # type: ignore[misc]  # that is the point


def test_the_places_of_a_mixture_count_from_the_current_folder(
    edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = edit("data=DataSpec(", "data=DataSpec(")
    monkeypatch.chdir(tmp_path)
    found = load_job(file, overrides=["data.train={a: 2, s3://b/c: 1}"]).job
    assert found.data.sources == {str(tmp_path / "a"): 2.0, "s3://b/c": 1.0}
    with pytest.raises(SpecError, match="names one place twice"):
        load_job(file, overrides=["data.train={a: 2, ./a: 1}"])
