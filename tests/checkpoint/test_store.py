import pytest
import torch

from rayway.checkpoint.share import plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.checkpoint.tensors import weights_sha256
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder


def never(line: str) -> None:
    raise AssertionError(f"skipped: {line}")


def keys(run: RunFolder, folder: str) -> list[str]:
    return [info.key for info in run.checkpoints.at(folder).list()]


def steps(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store.committed()]


def test_what_was_saved_is_loaded(run, begin, state, same) -> None:
    store = begin(run)
    facts = {"lr": 0.1, "betas": [0.9, 0.95], "plan": {"seed": 7, "none": None}}
    saved = store.save(5, plan_share(state(5)), facts)
    for loaded in (store.load(5), store.load_newest(never), begin(run).load_newest(never)):
        assert loaded is not None
        assert same(loaded.tensors, state(5))
        assert (loaded.step, loaded.attempt, loaded.facts) == (5, 1, facts)
        assert loaded.weights_sha256 == saved.weights_sha256 == weights_sha256(state(5)["model"])
        assert loaded.bytes == saved.bytes
    assert store.committed() == [saved]


def test_a_run_without_checkpoints_begins_at_the_beginning(run, begin) -> None:
    store = begin(run)
    assert store.load_newest(never) is None
    assert store.committed() == []
    with pytest.raises(CheckpointError, match="step 5 cannot be loaded: it does not exist"):
        store.load(5)


def test_a_checkpoint_holds_the_files_of_one_save_and_no_other(run, begin, state) -> None:
    store = begin(run)
    folder = "step-00000005.attempt-001"
    run.checkpoints.put(f"{folder}/loss=0.3.safetensors", b"left by an earlier try")
    store.save(5, plan_share(state(5)), {})
    assert keys(run, folder) == [
        "COMMITTED",
        "manifest.json",
        "rank-00000.model-0.safetensors",
        "rank-00000.optimizer-0.safetensors",
    ]


def test_a_committed_checkpoint_is_never_written_again(run, begin, state, same) -> None:
    store = begin(run)
    store.save(5, plan_share(state(5)), {})
    with pytest.raises(CheckpointError, match="committed already"):
        store.save(5, plan_share(state(6)), {})
    assert same(store.load(5).tensors, state(5))


def test_a_new_attempt_may_save_a_step_anew_and_its_copy_counts(run, begin, state, same) -> None:
    begin(run).save(5, plan_share(state(5, 1)), {})
    second = begin(run)
    second.save(5, plan_share(state(5, 2)), {})
    assert [(entry.step, entry.attempt) for entry in second.committed()] == [(5, 1), (5, 2)]
    assert same(second.load(5).tensors, state(5, 2))
    run.checkpoints.delete(["step-00000005.attempt-002/rank-00000.model-0.safetensors"])
    assert same(second.load(5).tensors, state(5, 1))
    assert second.prune(1, None, in_use=5) == []
    assert second.prune(1, None, None) == ["step-00000005.attempt-001"]


def test_an_attempt_that_was_replaced_cannot_commit_or_delete(run, begin, state) -> None:
    first = begin(run)
    first.save(5, plan_share(state(5)), {})
    first.save(6, plan_share(state(6)), {})
    second = begin(run)
    with pytest.raises(CheckpointError, match="attempt 1 of run a-1 may not commit step 7"):
        first.save(7, plan_share(state(7)), {})
    with pytest.raises(CheckpointError, match="newer attempt"):
        first.prune(1, None, None)
    assert steps(second) == [5, 6]
    assert keys(run, "step-00000007.attempt-001") == []


@pytest.mark.parametrize("question", [1, 2, 3])
def test_the_fence_is_asked_at_the_beginning_before_the_marker_and_after_it(
    run, state, question
) -> None:
    attempt = run.next_attempt({})
    asked = []

    def replaced_at_the_question() -> bool:
        asked.append(run.checkpoints.exists("step-00000005.attempt-001/COMMITTED"))
        return len(asked) < question

    store = CheckpointStore(run, attempt=attempt, is_newest_attempt=replaced_at_the_question)
    with pytest.raises(CheckpointError, match="newer attempt"):
        store.save(5, plan_share(state(5)), {})
    assert asked == [False, False, True][:question]
    assert store.committed() == []


def test_a_marker_of_somebody_else_is_not_overwritten(run, state) -> None:
    attempt, key = run.next_attempt({}), "step-00000005.attempt-001/COMMITTED"
    asked = []

    def yes_but_another_commits_meanwhile() -> bool:
        asked.append(1)
        if len(asked) == 2:
            run.checkpoints.put(key, b"theirs")
        return True

    store = CheckpointStore(
        run, attempt=attempt, is_newest_attempt=yes_but_another_commits_meanwhile
    )
    with pytest.raises(CheckpointError, match="written by somebody else"):
        store.save(5, plan_share(state(5)), {})
    assert run.checkpoints.get(key) == b"theirs"


def test_a_fence_that_cannot_be_asked_stops_the_commit(run, state) -> None:
    def unreachable() -> bool:
        raise StorageError("no answer")

    store = CheckpointStore(run, attempt=run.next_attempt({}), is_newest_attempt=unreachable)
    with pytest.raises(StorageError, match="no answer"):
        store.save(5, plan_share(state(5)), {})
    assert store.committed() == []


def test_retention_goes_by_number_not_by_text(run, begin, state) -> None:
    store = begin(run)
    left = []
    for step in [9, 10, 99, 100, 1000, 99_999_999, 100_000_000]:
        store.save(step, plan_share(state(step)), {})
        store.prune(2, None, None)
        left.append(steps(store))
    assert left[:5] == [[9], [9, 10], [10, 99], [99, 100], [100, 1000]]
    assert left[5:] == [[1000, 99_999_999], [99_999_999, 100_000_000]]
    assert len(run.checkpoints.folders()) == 2


def test_what_is_in_use_and_every_so_many_steps_stay(run, begin, state) -> None:
    store = begin(run)
    for step in range(5, 35, 5):
        store.save(step, plan_share(state(step)), {})
    store.prune(1, 10, in_use=5)
    assert steps(store) == [5, 10, 20, 30]


def test_nothing_is_deleted_before_this_attempt_has_committed(run, begin, state) -> None:
    first = begin(run)
    for step in [1, 2, 3]:
        first.save(step, plan_share(state(step)), {})
    second = begin(run)
    assert second.prune(1, None, None) == []
    second.save(4, plan_share(state(4)), {})
    assert len(second.prune(1, None, None)) == 3
    assert steps(second) == [4]


def test_a_newer_checkpoint_that_was_skipped_does_not_push_out_sound_ones(
    run, begin, state
) -> None:
    first = begin(run)
    for step in [9, 12]:
        first.save(step, plan_share(state(step)), {})
    run.checkpoints.delete(["step-00000012.attempt-001/rank-00000.model-0.safetensors"])
    second = begin(run)
    loaded = second.load_newest(lambda line: None)
    assert loaded is not None
    second.save(10, plan_share(state(10)), {})
    second.prune(1, None, in_use=loaded.step)
    assert steps(second) == [9, 10, 12]
    second.save(12, plan_share(state(12, 2)), {})
    second.prune(1, None, None)
    assert run.checkpoints.folders() == ["step-00000012.attempt-002"]


def test_half_written_folders_of_older_attempts_go_and_of_this_one_stay(run, begin, state) -> None:
    begin(run)
    second = begin(run)
    for attempt in (1, 2, 3):
        run.checkpoints.put(
            f"step-00000009.attempt-{attempt:03d}/rank-00000.model-0.safetensors", b"half"
        )
    second.save(5, plan_share(state(5)), {})
    assert second.prune(3, None, None) == ["step-00000009.attempt-001"]
    assert run.checkpoints.folders()[1:] == [f"step-00000009.attempt-00{n}" for n in (2, 3)]


class Stubborn(Objects):
    """Objects some of which cannot be deleted for a while."""

    stuck = True

    def delete_folder(self, prefix: str) -> None:
        if self.stuck and "step-00000001" in prefix and self.list(prefix):
            raise StorageError("no permission to delete")
        super().delete_folder(prefix)


def test_a_deletion_that_fails_is_told_and_tried_again(tmp_path, new_run, begin, state) -> None:
    run = new_run(Stubborn(str(tmp_path / "a-1")))
    store = begin(run)
    told: list[str] = []
    for step in [1, 2]:
        store.save(step, plan_share(state(step)), {})
    assert store.prune(1, None, None, told.append) == []
    assert "step-00000001.attempt-001 could not be deleted: no permission" in told[0]
    assert steps(store) == [2]
    Stubborn.stuck = False
    assert store.prune(1, None, None) == ["step-00000001.attempt-001"]
    assert run.checkpoints.folders() == ["step-00000002.attempt-001"]


class Flipping(Objects):
    """A storage that changes one bit of what it is given, and calls it a success."""

    flip = ""

    def put(self, key: str, data: object) -> None:
        super().put(key, data)  # type: ignore[arg-type]
        if self.flip and key.endswith(self.flip):
            stored = bytearray(self.get(key))
            stored[len(stored) // 2] ^= 1
            super().put(key, bytes(stored))


class Cutting(Flipping):
    """A storage that keeps half of what it is given, and calls it a success."""

    def put(self, key: str, data: object) -> None:
        Objects.put(self, key, data)  # type: ignore[arg-type]
        if self.flip and key.endswith(self.flip):
            stored = self.get(key)
            Objects.put(self, key, stored[: len(stored) // 2])


@pytest.mark.parametrize(
    "file",
    ["rank-00000.model-0.safetensors", "rank-00000.optimizer-0.safetensors", "manifest.json"],
)
@pytest.mark.parametrize("kind", [Flipping, Cutting])
def test_a_write_that_the_storage_spoils_is_found_before_the_commit(
    tmp_path, new_run, begin, state, file, kind
) -> None:
    run = new_run(kind(str(tmp_path / "a-1")))
    begin(run).save(1, plan_share(state(1)), {})
    run.objects.flip = file
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        begin(run).save(2, plan_share(state(2)), {})
    assert run.checkpoints.folders() == ["step-00000001.attempt-001"]


def test_a_failed_save_leaves_nothing_and_the_next_one_works(run, begin, state) -> None:
    store = begin(run)
    for tensors, facts in [
        ({"../up": {}}, {}),
        ({"model": {"a": torch.zeros(1, device="meta")}}, {}),
        (state(5), {"a": (1,)}),
        (state(5), {"a": float("nan")}),
    ]:
        with pytest.raises(StorageError):
            store.save(5, plan_share(tensors), facts)  # type: ignore[arg-type]
        assert run.checkpoints.folders() == []
    store.save(5, plan_share(state(5)), {})
    assert steps(store) == [5]


def test_a_mapped_checkpoint_outlives_its_deletion(run, begin, state, same) -> None:
    store = begin(run)
    store.save(1, plan_share(state(1)), {})
    loaded = store.load(1)
    store.save(2, plan_share(state(2)), {})
    store.prune(1, None, None)
    assert same(loaded.tensors, state(1))


def test_tied_weights_come_back_tied(run, begin, state) -> None:
    store = begin(run)
    store.save(1, plan_share(state(1)), {})
    model = store.load(1).tensors["model"]
    model["emb.weight"][0, 0] = 42
    assert model["head.weight"][0, 0] == 42


def test_a_folder_that_vanished_is_told(run, begin, state) -> None:
    store = begin(run)
    for step in [5, 10]:
        store.save(step, plan_share(state(step)), {})
    run.checkpoints.delete_folder("step-00000010.attempt-001")
    told: list[str] = []
    loaded = store.load_newest(told.append)
    assert loaded is not None
    assert loaded.step == 5
    assert told == ["checkpoint step-00000010.attempt-001 is skipped: its folder is gone."]


def test_a_run_whose_checkpoints_are_all_gone_does_not_begin_anew(run, begin, state) -> None:
    store = begin(run)
    store.save(5, plan_share(state(5)), {})
    run.checkpoints.delete(["step-00000005.attempt-001/COMMITTED"])
    with pytest.raises(CheckpointError, match=r"none of the 1 found .* is sound"):
        store.load_newest(lambda line: None)
    run.checkpoints.delete_folder("step-00000005.attempt-001")
    with pytest.raises(CheckpointError, match="none of the 0 found"):
        store.load_newest(lambda line: None)
    run.objects.put("checkpoints/newest.json", b"not JSON")
    with pytest.raises(CheckpointError, match="none of the 0 found"):
        store.load_newest(lambda line: None)


def test_a_crash_in_the_very_first_save_is_told_and_begins_anew(run, begin) -> None:
    store = begin(run)
    run.checkpoints.put("step-00000005.attempt-001/rank-00000.model-0.safetensors", b"half")
    told: list[str] = []
    assert store.load_newest(told.append) is None
    assert "step-00000005.attempt-001 is skipped: COMMITTED is missing" in told[0]
