"""Damaged checkpoints and full disks: the newest whole checkpoint is loaded, and faults of the others are reported."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ProcessRanks, Ranks
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from train import cases_damage as cases
from train import cases_train

from moe_rt.errors import CorruptCheckpoint, InvalidConfig, PeerDead, WriteFailed
from moe_rt.train import checkpoint, digests, train
from moe_rt.train.index import IndexedWriter
from moe_rt.train.loop import make_optimizer
from moe_rt.train.parallel import process_group

MakeRanks = Callable[[str, int], Ranks]
DATA, INDEX, MANIFEST, SUMS = "__0_0.distcp", ".metadata", "manifest.json", "SHA256SUMS"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    cases.save(None, directory, 1, 2)
    return directory


@pytest.fixture
def copy(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def another_digit(path: Path, at: int) -> None:
    text = path.read_text()
    path.write_text(text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :])


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swap_names(newest: Path) -> None:
    """Put the older checkpoint under the newer one's name."""
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("step-00000001"), newest)


def leave_half(newest: Path) -> None:
    """Leave what an interrupted removal without a prior rename would leave."""
    (newest / DATA).rename(newest.with_name("step-00000002.old.tmp"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing data": (lambda newest: (newest / DATA).unlink(), f"{DATA}: got no such file"),
    "missing metadata": (lambda newest: (newest / INDEX).unlink(), f"{INDEX}: got no such file"),
    "missing manifest": (lambda newest: (newest / MANIFEST).unlink(), f"{MANIFEST}: got no such file"),
    "missing digests": (lambda newest: (newest / SUMS).unlink(), f'{SUMS}: got "No such file or directory"'),
    "truncated": (lambda newest: os.truncate(newest / DATA, 5000), f"{DATA}: got digest"),
    "emptied": (lambda newest: os.truncate(newest / DATA, 0), f"{DATA}: got digest e3b0c44"),
    "bit of data": (lambda newest: flip(newest / DATA, 8 * 4000), f"{DATA}: got digest"),
    "bit of metadata": (lambda newest: flip(newest / INDEX, 8 * 100), f"{INDEX}: got digest"),
    "bit of manifest": (lambda newest: flip(newest / MANIFEST, 8 * 9), f"{MANIFEST}: got digest"),
    "digit of digests": (lambda newest: another_digit(newest / SUMS, 9), f"{INDEX}: got digest"),
    "empty manifest": (lambda newest: os.truncate(newest / MANIFEST, 0), f"{MANIFEST}: got digest e3b0c44"),
    "empty digests": (lambda newest: os.truncate(newest / SUMS, 0), f"{SUMS} does not name it"),
    "line of digests lost": (lambda newest: os.truncate(newest / SUMS, 76), f"{DATA}: got a file, expected none"),
    "manifest of another step": (
        lambda newest: shutil.copy(newest.with_name("step-00000001") / MANIFEST, newest),
        f"{MANIFEST}: got digest",
    ),
    "another step": (swap_names, f"{MANIFEST}: got step 1, expected that of step-00000002"),
    "directory for a file": (lambda newest: replace_by_directory(newest / DATA), f"{DATA}: got no regular file"),
    "pipe for a file": (lambda newest: replace_by_pipe(newest / DATA), f"{DATA}: got no regular file"),
    "file for the directory": (
        lambda newest: (shutil.rmtree(newest), newest.write_text("")),
        f'{SUMS}: got "Not a directory"',
    ),
    "extra file": (lambda newest: (newest / "__1_0.distcp").touch(), "__1_0.distcp: got a file, expected none"),
    "half a checkpoint": (leave_half, f"{DATA}: got no such file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_resumes_from_the_newest_whole_one(copy: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(copy / "step-00000002")
    assert cases.load(None, copy) == 1
    (skipped, resumed) = capsys.readouterr().out.splitlines()
    assert skipped.startswith(f"resume: {copy}/step-00000002 is damaged, so it is now step-00000002.damaged")
    assert message in skipped
    assert resumed == f"resume: goes on from {copy}/step-00000001"
    assert (copy / "step-00000002.damaged").exists()
    cases.save(None, copy, 2, 3)
    assert sorted(path.name for path in copy.iterdir()) == ["step-00000002", "step-00000003"]
    assert cases.load(None, copy) == 3


@pytest.mark.parametrize("kind", DAMAGE)
def test_no_whole_one_is_an_error_that_names_the_files(copy: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(copy / "step-00000002")
    (copy / "step-00000001" / INDEX).unlink()
    if kind == "another step":  # the damaged one is a copy of step 1, made before that was damaged
        message = f"{MANIFEST}: got step 1"
    before = sorted(path.name for path in copy.rglob("*"))
    with pytest.raises(CorruptCheckpoint) as raised:
        cases.load(None, copy)
    assert f"{copy}/step-00000002: " in str(raised.value)
    assert f"{copy}/step-00000001: {INDEX}: got no such file" in str(raised.value)
    assert message in str(raised.value)
    assert sorted(path.name for path in copy.rglob("*")) == before, "left unchanged for inspection"


@pytest.mark.parametrize("kind", ["missing data", "bit of data", "empty digests", "another step"])
def test_all_ranks_fall_back_alike(make_ranks: MakeRanks, tmp_path: Path, kind: str) -> None:
    pair = make_ranks("shm", 2)
    pair.run(cases.save, tmp_path, 1, 2)
    DAMAGE[kind][0](tmp_path / "step-00000002")
    assert pair.run(cases.load, tmp_path) == [1, 1]
    DAMAGE["missing manifest"][0](tmp_path / "step-00000001")
    for outcome in pair.outcomes(cases.load, tmp_path):
        assert isinstance(outcome, CorruptCheckpoint), outcome
        assert "step-00000001: manifest.json: got no such file" in str(outcome)


def test_all_ranks_load_what_the_first_one_sees(make_ranks: MakeRanks, two: Path) -> None:
    assert make_ranks("shm", 2).run(cases.load_with_a_late_listing, two) == [2, 2]


def test_every_file_is_checked_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the files in the order of their names; the order of a set differs between processes."""
    names = [f"__{i}_0.distcp" for i in range(12)]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / SUMS).write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
    monkeypatch.setattr(digests.dist, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(digests.dist, "get_rank", lambda rank=rank: rank)
        damaged = [clause.split(":")[0] for clause in digests._damage_seen_here(tmp_path)]
        assert damaged == sorted(names)[rank::3]


def test_no_flipped_bit_loads(two: Path, tmp_path: Path) -> None:
    """None of 200 bits, flipped one at a time, loads; each byte of a checkpoint's files is equally likely."""
    only = Path(shutil.copytree(two / "step-00000002", tmp_path / "step-00000002"))
    files = sorted(only.iterdir())
    sizes = [path.stat().st_size for path in files]
    rng = random.Random(0)
    seen = set()
    for _ in range(200):
        (path,) = rng.choices(files, weights=sizes)
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(CorruptCheckpoint, match=r"got digest|expected the digests|got no such file"):
            cases.load(None, tmp_path)
        flip(path, bit)
        seen.add(path.name)
    assert seen == {DATA, INDEX, MANIFEST, SUMS}
    assert cases.load(None, tmp_path) == 2


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Run without root's right to read any file."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("locked", "message"),
    [
        (f"step-00000002/{DATA}", f'{DATA}: got "Permission denied"'),
        ("step-00000002", f'{SUMS}: got "Permission denied"'),
        (".", 'rank 0 got "Permission denied"'),
    ],
)
def test_unreadable_files_are_damage(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the path is relative because other users may not pass through its parents
    tmp_path.chmod(0o755)
    directory = Path("checkpoints")
    shutil.copytree(two / "step-00000002", directory / "step-00000002")
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755)
    (directory / locked).chmod(0)
    with as_nobody(), pytest.raises(CorruptCheckpoint, match=message):
        cases.load(None, directory)
    (directory / locked).chmod(0o755)


def test_metadata_is_not_unpickled(copy: Path) -> None:
    """Loading does not read the index that torch.distributed.checkpoint pickles, even if its digest is right."""
    newest = copy / "step-00000002"
    (newest / INDEX).write_bytes(b"cos\n_exit\n(I1\ntR.")  # unpickling this ends the process
    sums = subprocess.run(["sha256sum", DATA, INDEX, MANIFEST], cwd=newest, capture_output=True, check=True)
    (newest / SUMS).write_bytes(sums.stdout)
    assert cases.load(None, copy) == 2


def test_sha256sum_checks_a_checkpoint(two: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=two / "step-00000002", check=True)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 13])
def test_a_digest_covers_all_pieces_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(digests, "CHUNK", 4)
    (tmp_path / "file").write_bytes(text := bytes(range(size)))
    assert digests._sha256(tmp_path / "file") == hashlib.sha256(text).hexdigest()


def test_steps_of_nine_digits(tmp_path: Path) -> None:
    """Steps of nine digits are found, and are newer than those of eight; float32 represents these numbers exactly."""
    cases.save(None, tmp_path, 99_999_992, 100_000_000, 100_000_008)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100000000", "step-100000008"]
    assert cases.load(None, tmp_path) == 100_000_008


def test_a_crash_while_an_old_one_is_removed(copy: Path) -> None:
    """A removal that crashes leaves no directory with a checkpoint's name, which would be reported as damaged."""

    def cut_short(directory: Path, **_: object) -> None:
        (directory / MANIFEST).unlink()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            cases.save(None, copy, 3)
    assert sorted(path.name for path in copy.iterdir()) == ["step-00000001.old.tmp", "step-00000002", "step-00000003"]
    assert cases.load(None, copy) == 3


def test_nothing_is_published_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss leaves no checkpoint whose name is complete and whose files are not."""
    final, flushed = tmp_path / "step-00000001", []
    monkeypatch.setattr(checkpoint, "_flush", lambda path: flushed.append((path.name, final.exists())))
    cases.save(None, tmp_path, 1)
    assert set(flushed[:-1]) == {(MANIFEST, False), (SUMS, False), ("step-00000001.tmp", False)}
    assert flushed[-1] == (tmp_path.name, True)


def test_damaged_ones_stay_until_training_has_passed_them(tmp_path: Path) -> None:
    """A link to nowhere in place of a checkpoint is replaced as any other entry."""
    for step in (1, 2, 3):
        (tmp_path / f"step-0000000{step}.damaged").mkdir()
    (tmp_path / "step-00000002").symlink_to("nowhere")
    cases.save(None, tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003.damaged"]
    assert cases.load(None, tmp_path) == 2


def test_a_save_leaves_the_newest_two_and_nothing_unfinished(tmp_path: Path) -> None:
    """Also if several older ones, and several that were never finished, are there."""
    for name in ("step-00000001", "step-00000002", "step-00000003", "step-00000004", "step-00000007.tmp",
                 "step-00000008.tmp", "step-00000001.old.tmp"):  # fmt: skip
        (tmp_path / name).mkdir()
    cases.save(None, tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_all_damaged_ones_are_set_aside(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(copy / "step-00000002", copy / "step-00000003")
    for step in (2, 3):
        os.truncate(copy / f"step-0000000{step}" / DATA, 5000)
    assert cases.load(None, copy) == 1
    aside = ["step-00000001", "step-00000002.damaged", "step-00000003.damaged"]
    assert sorted(path.name for path in copy.iterdir()) == aside
    assert capsys.readouterr().out.count("is damaged, so it is now") == 2


def test_the_first_rank_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: Any = {2: (OSError(28, "full"), None), 1: (OSError(5, "broken"), None), 3: (OSError(13, "shut"), None)}
    for rank, peer in {0: 1, 1: -1, 2: 1}.items():
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)
        assert checkpoint._failure(CheckpointException("write", failures)) == (peer, 'rank 1 got "broken"')


def test_each_field_of_the_model_is_compared(tmp_path: Path) -> None:
    fields = ("num_layers", "hidden", "num_heads", "intermediate", "num_experts", "num_topk", "tie_embeddings")
    manifest = {name: getattr(cases.CONFIG, name) for name in fields}
    model = cases._model()
    for name in fields:
        other = {**manifest, name: manifest[name] + 1}
        with pytest.raises(InvalidConfig, match=rf"^{name}: got {manifest[name]}, expected {other[name]} as in"):
            checkpoint._load_whole(tmp_path, other, model, make_optimizer(model, cases.CONFIG), cases.CONFIG)


def test_random_numbers_and_counts_of_steps_go_on(tmp_path: Path) -> None:
    torch.manual_seed(7)
    cases.save(None, tmp_path, 3)
    expected = torch.rand(4)
    torch.manual_seed(8)
    model = cases._model()
    optimizer = make_optimizer(model, cases.CONFIG)
    with process_group("cpu", 60.0):
        checkpoint.load(tmp_path, model, optimizer, cases.CONFIG)
    assert torch.equal(torch.rand(4), expected)
    assert [float(moments["step"]) for moments in optimizer.state.values()] == [3.0]


def test_a_start_from_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.load(None, tmp_path / "none") == 0
    assert capsys.readouterr().out == f"resume: {tmp_path}/none has no checkpoint, so this starts from step 0\n"


def test_does_not_mix_with_checkpoints_of_another_run(copy: Path) -> None:
    """A new run refuses a directory with another run's checkpoints, which are newer and would displace its own."""
    with pytest.raises(InvalidConfig, match=r"out: got .* which holds a run"):
        train(cases_train.tiny(out=copy.parent, steps=1))


def test_another_model_of_the_same_configuration(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_model", lambda value=0.0: cases._Large())
    with pytest.raises(InvalidConfig, match=r"does not fit: .* Missing key in checkpoint state_dict: exp_avg.parts.0"):
        cases.load(None, copy)


@pytest.mark.parametrize("limited", [0, 1])
def test_a_refused_write_is_an_error_of_all_ranks(make_ranks: MakeRanks, tmp_path: Path, limited: int) -> None:
    messages, *blamed = zip(*make_ranks("shm", 2).run(cases.save_beyond_a_limit, tmp_path, limited), strict=True)
    assert blamed == [(0, 1), (-1, 0) if limited == 0 else (1, -1)], "the rank that raises, and the peer that failed"
    expected = f'{tmp_path}/step-00000002: got no checkpoint: rank {limited} got "File too large"'
    assert [message.startswith(expected) for message in messages] == [True] * 2, messages


def test_a_full_disk_says_that_it_is_full(make_ranks: MakeRanks, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=900k", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot mount a small disk")
    try:
        pair = make_ranks("shm", 2)
        pair.run(cases.save, tmp_path, 1)
        for message, *_ in pair.run(cases.save_beyond_the_disk, tmp_path):
            assert 'got "No space left on device"' in message
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("of_the_system", [True, False])
def test_the_systems_error_of_a_write_is_shown(monkeypatch: pytest.MonkeyPatch, of_the_system: bool) -> None:
    """torch.save raises a RuntimeError while it handles the system's error, without its text."""
    first = OSError(errno.ENOSPC, "No space left on device") if of_the_system else ValueError("another")
    hidden = RuntimeError("unexpected pos 448 vs 342")

    def write_data(*given: Any) -> None:
        try:
            raise first
        except (OSError, ValueError):
            raise hidden  # noqa: B904, as torch does

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    with pytest.raises((OSError, RuntimeError)) as raised:
        IndexedWriter(Path("nowhere")).write_data(*[None] * 2)  # type: ignore[arg-type]
    assert raised.value is (first if of_the_system else hidden)


@pytest.mark.parametrize("where", ["_begin", "_write_manifest", "_sha256", "_publish"])
def test_nothing_is_left_of_a_refused_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The disk fills up at each step of a save. The older checkpoint stays, and the next save works."""
    cases.save(None, tmp_path, 1)
    owner = checkpoint.digests if where == "_sha256" else checkpoint
    act = getattr(owner, where)

    def refused(*given: Any) -> None:
        if where != "_publish":
            act(*given)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, refused)
        with pytest.raises(WriteFailed) as raised:
            cases.save(None, tmp_path, 2)
    said = f'{tmp_path}/step-00000002: got no checkpoint: rank 0 got "No space left on device"'
    assert str(raised.value) == f"{said} (moe-rt docs errors#writefailed)"
    assert raised.value.rank == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    cases.save(None, tmp_path, 2)
    assert cases.load(None, tmp_path) == 2


def test_a_rank_that_dies_in_a_save_is_named(tmp_path: Path) -> None:
    ranks = ProcessRanks(2)
    try:
        survivor, _ = ranks.outcomes(cases.killed_while_reading, tmp_path, 1)
    finally:
        ranks.close()
    assert isinstance(survivor, PeerDead)
    assert survivor.peer == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.tmp"]  # never taken for a whole checkpoint
