import hashlib
import pickle
import random
from collections.abc import Callable
from dataclasses import replace as with_changes
from pathlib import Path

import pytest

import rayway
from rayway.checkpoint.manifest import Manifest, Marker
from rayway.checkpoint.share import plan_share
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder

FILES = [
    "rank-00000.model-0.safetensors",
    "rank-00000.optimizer-0.safetensors",
    "manifest.json",
    "COMMITTED",
]
NEWEST, OLDER = "step-00000012.attempt-001", "step-00000009.attempt-001"
Damage = Callable[[Objects], None]


def change(file: str, how: Callable[[bytes], bytes]) -> Damage:
    def damage(checkpoints: Objects) -> None:
        key = f"{NEWEST}/{file}"
        old = checkpoints.get(key)
        new = how(old)
        assert new != old
        checkpoints.put(key, new)

    return damage


def flip(seed: int) -> Callable[[bytes], bytes]:
    def how(data: bytes) -> bytes:
        draw = random.Random(seed)
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    return how


def cut(seed: int) -> Callable[[bytes], bytes]:
    return lambda data: data[: random.Random(seed).randrange(len(data))]


def zero(seed: int) -> Callable[[bytes], bytes]:
    def how(data: bytes) -> bytes:
        size = 4096 if len(data) > 4096 else 16
        start = random.Random(seed).randrange(len(data) // size) * size
        return data[:start] + bytes(size) + data[start + size :]

    return how


def replace(file: str, source: str) -> Damage:
    return lambda checkpoints: checkpoints.put(f"{NEWEST}/{file}", checkpoints.get(source))


def swap(checkpoints: Objects) -> None:
    first, second = (f"{NEWEST}/{file}" for file in FILES[:2])
    one, two = checkpoints.get(first), checkpoints.get(second)
    checkpoints.put(first, two)
    checkpoints.put(second, one)


def lose(file: str) -> Damage:
    return lambda checkpoints: checkpoints.delete([f"{NEWEST}/{file}"])


def add(file: str, data: bytes = b"surplus") -> Damage:
    return lambda checkpoints: checkpoints.put(f"{NEWEST}/{file}", data)


def stale_folder(checkpoints: Objects) -> None:
    """All of the older checkpoint under the newer one's name."""
    for file in FILES:
        checkpoints.put(f"{NEWEST}/{file}", checkpoints.get(f"{OLDER}/{file}"))


CASES: dict[str, tuple[Damage, str]] = {
    **{f"flip {f} {i}": (change(f, flip(i)), f) for f in FILES for i in range(16)},
    **{f"cut {f} {i}": (change(f, cut(i)), f) for f in FILES for i in range(5)},
    **{f"zero {f} {i}": (change(f, zero(i)), f) for f in FILES for i in range(3)},
    **{f"empty {f}": (change(f, lambda data: b""), f) for f in FILES},
    **{f"longer {f}": (change(f, lambda data: data + b"\0"), f) for f in FILES},
    **{f"doubled {f}": (change(f, lambda data: data + data), f) for f in FILES},
    **{f"stale {f}": (replace(f, f"{OLDER}/{f}"), f) for f in FILES},
    **{f"lost {f}": (lose(f), f) for f in FILES},
    "swapped": (swap, FILES[0]),
    "stale folder": (stale_folder, "COMMITTED"),
    "surplus tensors": (add("extra.safetensors"), "extra.safetensors"),
    "surplus pickle": (add("extra.pkl", pickle.dumps(1)), "extra.pkl"),
    "surplus below": (add("below/extra"), "below/extra"),
    "surplus hidden": (add(".hidden"), ".hidden"),
}


def test_there_are_enough_ways_to_damage_a_checkpoint() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_older_used(
    run, begin, state, same, case
) -> None:
    store = begin(run)
    for step in [9, 12]:
        store.save(step, plan_share(state(step)), {"step": step})
    damage, file = CASES[case]
    damage(run.checkpoints)
    told: list[str] = []
    loaded = begin(run).load_newest(told.append)
    assert loaded is not None
    assert same(loaded.tensors, state(9))
    assert (loaded.step, loaded.facts) == (9, {"step": 9})
    [line] = told
    assert line.startswith(f"checkpoint {NEWEST} is skipped: {file} ")
    assert "\n" not in line
    with pytest.raises(CheckpointError, match=rf"step 12 cannot be loaded: {NEWEST}.*{file}"):
        store.load(12)


@pytest.mark.parametrize("file", FILES)
def test_when_all_are_damaged_the_run_does_not_begin_anew(run, begin, state, file) -> None:
    store = begin(run)
    for step in [9, 12]:
        store.save(step, plan_share(state(step)), {})
    for folder in (OLDER, NEWEST):
        run.checkpoints.put(f"{folder}/{file}", b"")
    told: list[str] = []
    with pytest.raises(CheckpointError, match="none of the 2 found"):
        store.load_newest(told.append)
    assert len(told) == 2


def test_a_checkpoint_of_another_run_is_refused(tmp_path, new_run, begin, state) -> None:
    ours, theirs = new_run(str(tmp_path / "ours")), new_run(str(tmp_path / "theirs"))
    begin(ours).save(9, plan_share(state(9)), {})
    begin(theirs).save(12, plan_share(state(12)), {})
    (tmp_path / f"theirs/checkpoints/{NEWEST}").rename(tmp_path / f"ours/checkpoints/{NEWEST}")
    told: list[str] = []
    loaded = begin(ours).load_newest(told.append)
    assert loaded is not None
    assert loaded.step == 9
    assert "manifest.json is that of run theirs, not ours" in told[0]


def test_a_renamed_checkpoint_is_refused(tmp_path, new_run, begin, state) -> None:
    run = new_run(str(tmp_path / "a-1"))
    store = begin(run)
    for step in [9, 12]:
        store.save(step, plan_share(state(step)), {})
    folder = tmp_path / "a-1/checkpoints"
    (folder / NEWEST).rename(folder / "step-00000015.attempt-001")
    told: list[str] = []
    loaded = store.load_newest(told.append)
    assert loaded is not None
    assert loaded.step == 9
    assert told == [
        f"checkpoint step-00000015.attempt-001 is skipped: COMMITTED is that of {NEWEST}."
    ]


def test_an_unreachable_storage_is_no_reason_to_take_an_older_one(
    tmp_path, new_run, begin, state
) -> None:
    class Unreachable(Objects):
        def open_read(self, key: str) -> object:  # type: ignore[override]
            raise StorageError("no answer")

    run = new_run(str(tmp_path / "a-1"))
    store = begin(run)
    for step in [9, 12]:
        store.save(step, plan_share(state(step)), {})
    with pytest.raises(StorageError, match="no answer"):
        begin(RunFolder(Unreachable(run.url))).load_newest(lambda line: None)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.canary), "w")


def payload_for(canary: Path) -> bytes:
    data = pickle.dumps(Payload(canary))
    pickle.loads(data).close()  # made two lines above; shows that the payload would run
    assert canary.exists()  # it is live
    canary.unlink()
    return data


@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_place_of_a_file_never_runs(run, begin, state, tmp_path, file) -> None:
    canary = tmp_path / "canary_H30"
    store = begin(run)
    for step in [9, 12]:
        store.save(step, plan_share(state(step)), {})
    run.checkpoints.put(f"{NEWEST}/{file}", payload_for(canary))
    told: list[str] = []
    loaded = begin(run).load_newest(told.append)
    assert loaded is not None
    assert loaded.step == 9
    assert file in told[0]
    assert not canary.exists()


@pytest.mark.parametrize("file", FILES[:2])
def test_a_pickle_that_manifest_and_marker_vouch_for_never_runs(
    run, begin, state, tmp_path, file
) -> None:
    canary = tmp_path / "canary_H30"
    store = begin(run)
    store.save(12, plan_share(state(12)), {})
    data = payload_for(canary)
    objects = run.checkpoints.at(NEWEST)
    manifest = Manifest.from_json(objects.get("manifest.json"))
    sha256 = hashlib.sha256(data).hexdigest()
    forged = with_changes(
        manifest,
        files=tuple(
            with_changes(entry, bytes=len(data), sha256=sha256) if entry.name == file else entry
            for entry in manifest.files
        ),
    )
    marker = Marker.from_json(objects.get("COMMITTED"))
    objects.put(file, data)
    objects.put("manifest.json", forged.to_json())
    total = {"manifest_sha256": forged.digest(), "total_bytes": forged.total_bytes}
    objects.put("COMMITTED", with_changes(marker, **total).to_json())
    with pytest.raises(CheckpointError, match=f"{file} is no safetensors file"):
        store.load(12)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["run.json", "job.json", "checkpoints/newest.json"])
def test_a_pickle_among_the_runs_records_never_runs(run, begin, state, tmp_path, file) -> None:
    canary = tmp_path / "canary_H30"
    begin(run).save(12, plan_share(state(12)), {})
    run.objects.put(file, payload_for(canary))
    try:
        begin(RunFolder.open(run.url)).load_newest(lambda line: None)
    except StorageError as error:
        assert file in str(error)  # noqa: PT017 - some of the records are not needed to load
    assert not canary.exists()


def test_no_code_on_the_load_path_can_unpickle() -> None:
    root = Path(rayway.__path__[0])
    for room in ("storage", "checkpoint"):
        for path in (root / room).glob("*.py"):
            code = path.read_text()
            for word in ("pickle", "torch.load", "weights_only", "eval(", "exec(", "marshal"):
                assert word not in code, f"{path.name} mentions {word}"
