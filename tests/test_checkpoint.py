"""Checkpoints: complete or absent, also when the disk fills up or a file rots."""

import pytest
import torch

from torchspec import checkpoint
from torchspec.errors import RunError


def state(value):
    return {"step": value, "weights": {"w": torch.full((3,), float(value))}}


def save(folder, step, value, keep):
    checkpoint.write_part(folder, step, 0, value)
    checkpoint.complete(folder, step, 1, keep)


def test_round_trip_newest_and_chosen(tmp_path):
    for step in (0, 2, 10):
        save(tmp_path, step, state(step), keep=0)
    assert checkpoint.complete_steps(tmp_path) == [0, 2, 10]
    assert torch.equal(checkpoint.load_checkpoint(tmp_path)["weights"]["w"], torch.full((3,), 10.0))
    assert checkpoint.load_checkpoint(tmp_path, 2)["step"] == 2


def test_only_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, state(step), keep=2)
    assert checkpoint.complete_steps(tmp_path) == [10, 11]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-11"]


def test_one_without_its_mark_does_not_count_and_is_written_anew(tmp_path):
    save(tmp_path, 1, state(1), keep=0)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "state-0.pt").write_bytes(b"half")
    assert checkpoint.load_checkpoint(tmp_path)["step"] == 1
    save(tmp_path, 2, state(2), keep=0)
    assert checkpoint.load_checkpoint(tmp_path)["step"] == 2


def test_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch):
    save(tmp_path, 1, state(1), keep=1)

    def full(obj, path):
        path.write_bytes(b"some of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"step 2 could not be written.*No space left.*kept: \[1\]"):
        save(tmp_path, 2, state(2), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert checkpoint.load_checkpoint(tmp_path)["step"] == 1


def test_corrupt_and_missing_are_sentences(tmp_path):
    with pytest.raises(RunError, match="no complete checkpoint"):
        checkpoint.load_checkpoint(tmp_path)
    for step in (1, 2):
        save(tmp_path, step, state(step), keep=0)
    with pytest.raises(RunError, match=r"of step 7 .* steps \[1, 2\]"):
        checkpoint.load_checkpoint(tmp_path, 7)
    file = tmp_path / "step-2" / "state-0.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunError, match=r"does not read.*steps \[1\]"):
        checkpoint.load_checkpoint(tmp_path)


def test_parts_of_several_ranks_are_one_state(tmp_path):
    for part, names in enumerate((["a", "tied"], ["b", "tied"])):
        moments = {name: {"exp_avg": torch.ones(2) * len(name)} for name in names}
        checkpoint.write_part(tmp_path, 3, part, {"step": 3, "optimizer": {"adamw": moments, "num_steps": 5}})
    checkpoint.complete(tmp_path, 3, 2, keep=0)
    found = checkpoint.load_checkpoint(tmp_path)
    assert found["step"] == 3 and found["optimizer"]["num_steps"] == 5
    assert found["optimizer"]["adamw"].keys() == {"a", "b", "tied"}
    assert found["optimizer"]["adamw"]["tied"]["exp_avg"].tolist() == [4, 4]


def test_a_missing_part_is_no_checkpoint_and_a_left_over_one_is_dropped(tmp_path):
    checkpoint.write_part(tmp_path, 3, 0, state(3))
    with pytest.raises(RunError, match=r"step 3 .*state-1.pt is not there"):
        checkpoint.complete(tmp_path, 3, 2, keep=0)
    assert checkpoint.complete_steps(tmp_path) == []
    checkpoint.write_part(tmp_path, 3, 1, {"from": "a killed run of two ranks"})
    save(tmp_path, 3, state(3), keep=0)
    assert "from" not in checkpoint.load_checkpoint(tmp_path)


def test_a_part_that_was_lost_is_named(tmp_path):
    save(tmp_path, 1, state(1), keep=0)
    for part in range(2):
        checkpoint.write_part(tmp_path, 2, part, state(2))
    checkpoint.complete(tmp_path, 2, 2, keep=0)
    (tmp_path / "step-2" / "state-1.pt").unlink()
    with pytest.raises(RunError, match=r"step-2 does not read .*state-1.pt.* earlier one \(steps \[1\]\)"):
        checkpoint.load_checkpoint(tmp_path)
