"""Every command on damaged and hostile files: no traceback, no hang, no file changed elsewhere.

    python -m campaigns.command_fuzz --inputs 20000 --state fuzz.jsonl     resumes where it was
    python -m campaigns.command_fuzz --only 4711 --keep /tmp/fuzz          that one again

An input is a command line and a copy of the files that it names, one to three of them changed, and
now and then an option with an odd value. The command runs in this process: a child that a parent
watches. An input fails when the command ends with a traceback, by a signal or with an unknown
status, takes more than ten seconds of the processor or waits for a minute, takes more than 2 GiB,
prints a control character or a warning, or changes a file other than its outputs. All is decided by
the seed and the number of the input. Commands that start processes of their own (parity, the
reference, --rerun, --workers) are not part of this.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from campaigns.mutations import more_words, mutate, mutate_folder

SECONDS, MEMORY = 10, 2 * 2**30
PATIENCE = 6  # times as long without the processor: waiting for something, on a busy machine
AT_ONCE = 400  # inputs of one child
STATUSES = {0, 1, 2}
SMALL = ("--steps", "1", "--size", "32x32", "--text-length", "4", "-s", "1")
MODEL = ("-m", "model", *SMALL)


@dataclass(frozen=True)
class Case:
    """A command line, the files it is given, those that are changed, and its outputs."""

    words: tuple[str, ...]
    inputs: tuple[str, ...]
    changed: tuple[str, ...]
    outputs: tuple[str, ...] = ("out",)
    weight: int = 2


@dataclass
class Result:
    """What happened to one input."""

    number: int
    command: str
    changes: list[str] = field(default_factory=list)
    status: int | None = None
    failure: str | None = None
    seconds: float = 0.0


def _case(
    words: str, changed: str, *, given: str = "", outputs: str = "out", weight: int = 2
) -> Case:
    names = tuple(changed.split())
    return Case(
        tuple(words.split()), (*names, *given.split()), names, tuple(outputs.split()), weight
    )


_QUANTIZE = "quantize model --method rtn --bits 4 --group 32 --eval-images 2"
_GENERATE = f"generate star {' '.join(MODEL)} -o out/a.png"
CASES = (
    _case("inspect model", "model", weight=4),
    _case("inspect model --all --json", "model"),
    _case("inspect model/vae", "model"),
    _case("audit model", "model", weight=4),
    _case("audit model --json --digests out/d.json", "model"),
    _case("audit model --against digests.json", "digests.json", given="model"),
    _case(_GENERATE, "model", weight=6),
    _case(f"{_GENERATE} --low-memory", "model"),
    _case("generate --from picture.png -o out/a.png", "picture.png", given="model", weight=4),
    _case(
        "generate --from picture.png -m model -o out/a.png", "picture.png", given="model", weight=4
    ),
    _case("generate --from picture.jpg -m model -o out/a.png", "picture.jpg", given="model"),
    _case("generate --from picture.webp -m model -o out/a.png", "picture.webp", given="model"),
    _case(f"{_GENERATE} --image photo.png", "photo.png", given="model", weight=4),
    _case(f"{_GENERATE} --image photo.jpg", "photo.jpg", given="model"),
    _case(f"{_GENERATE} --prompts prompts.txt".replace("star ", ""), "prompts.txt", given="model"),
    _case(f"{_GENERATE} --prompts prompts.csv".replace("star ", ""), "prompts.csv", given="model"),
    _case(
        f"{_GENERATE} --prompts prompts.jsonl".replace("star ", ""), "prompts.jsonl", given="model"
    ),
    _case(f"{_GENERATE} --lora lora.safetensors", "lora.safetensors", given="model"),
    _case(f"trace star {' '.join(MODEL)} -o out/t", "model"),
    _case("trace check ref", "ref"),
    _case("trace show ref --all --json", "ref"),
    _case("trace show ref pipeline/noise --save out/noise.npy", "ref"),
    _case(
        f"trace star {' '.join(MODEL)} -o out/t --inject ref --at pipeline/noise",
        "ref",
        given="model",
    ),
    _case("diff ref port", "ref port", weight=8),
    _case("diff ref port --json --map map.json", "ref port map.json", weight=4),
    _case("diff ref port --html out/d.html --floor floor --all", "ref port floor", weight=4),
    _case("diff ref port --quantized", "ref port"),
    _case("diff ref wrong --checkpoint model --repro out/r", "ref wrong model", weight=4),
    _case("sampler conform problem.json answer.json", "problem.json answer.json", weight=6),
    _case("sampler conform problem.json run", "run", given="problem.json"),
    _case("sampler plot karras -m model -o out/p.png", "model"),
    _case("calibrate status set", "set", weight=4),
    _case("calibrate verify set --sheet out/s.png", "set", weight=4),
    _case("calibrate repair set --no-run", "set", outputs="set", weight=4),
    _case("calibrate run --out set -m model", "set", given="model", outputs="set", weight=3),
    _case("calibrate run --out set", "set", given="model", outputs="set"),
    _case("calibrate export set --out out/npz --manifest out/m.json", "set"),
    _case("calibrate import npz --out out/set", "npz", weight=6),
    _case(
        "calibrate import npz --out out/set --settings settings.json", "settings.json", given="npz"
    ),
    _case("calibrate merge set other --out out/set", "set other"),
    _case("calibrate activations stats.sqlite --plot out/p.html", "stats.sqlite", weight=4),
    _case("calibrate activations stats.sqlite --plot out/p.png", "stats.sqlite"),
    _case("calibrate activations stats.sqlite --out out/s.sqlite", "stats.sqlite"),
    _case("calibrate activations set -m model --out out/s.sqlite", "set", given="model"),
    _case("calibrate blocks set -m model --out out/b --tokens 2", "set", given="model"),
    _case("evaluate images photos drawn --html out/e.html", "photos drawn", weight=4),
    _case("evaluate images photos.npz drawn.npz --json", "photos.npz drawn.npz"),
    _case("evaluate set set --against again --json", "set again"),
    _case(f"{_QUANTIZE} --set set --out q", "model set", outputs="q q.work"),
    _case(f"{_QUANTIZE} --prompts prompts.txt --dry-run --out q", "prompts.txt", given="model"),
    _case(
        "quantize model --method rtn --plan plan.json --prompts prompts.txt --dry-run --out q",
        "plan.json",
        given="model prompts.txt",
        weight=4,
    ),
    _case("quantize plan model --bits 3 --group 32 --save out/p.json", "model"),
    _case(
        "quantize plan model --set set --bpw 5 --group 32 --images 1 --sensitivity measured.json",
        "measured.json set",
        given="model",
        outputs="measured.json",
        weight=4,
    ),
    _case("quantize compare q4 q3 --html out/c.html", "q4 q3", weight=6),
    _case("quantize compare q4 --against again --json", "q4 again"),
    _case("audit q4", "q4"),
    _case(_GENERATE.replace("-m model", "-m q4"), "q4", weight=4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state", type=Path, help="results, a line each; an interrupted run resumes"
    )
    parser.add_argument("--only", type=int, nargs="+", help="these inputs, in this process")
    parser.add_argument("--keep", type=Path, help="with --only: leave the files here")
    parser.add_argument("--folder", type=Path, help="where to work; memory is fastest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        corpus = Path(scratch) / "corpus"
        if in_child(lambda: make_corpus(corpus)):  # MLX does not survive a fork: none here
            sys.exit("the corpus could not be made")
        if options.only:
            for number in options.only:
                place = options.keep or Path(scratch) / "run"
                shutil.rmtree(place, ignore_errors=True)
                print(json.dumps(vars(run_input(number, options.seed, corpus, place)), indent=1))
            return
        state = options.state or Path(scratch) / "state.jsonl"
        results = campaign(options.inputs, options.seed, corpus, Path(scratch), state)
    failures = [result for result in results if result["failure"]]
    for result in failures:
        print(f"{result['number']}: {result['command']} {result['changes']}: {result['failure']}")
    print(summary(results))
    sys.exit(1 if failures else 0)


def summary(results: list[dict[str, Any]]) -> str:
    """The figures of a campaign."""
    statuses = Counter(result["status"] for result in results)
    slowest = max((result["seconds"] for result in results), default=0.0)
    kinds = Counter((result["failure"] or "").split(":")[0] for result in results)
    del kinds[""]
    text = ", ".join(f"{count} with status {status}" for status, count in sorted(
        statuses.items(), key=lambda item: -item[1]))  # fmt: skip
    return (
        f"{len(results)} inputs: {text}; slowest {slowest:.1f} s; failures {dict(kinds) or 'none'}"
    )


def campaign(
    inputs: int, seed: int, corpus: Path, scratch: Path, state: Path
) -> list[dict[str, Any]]:
    """Run inputs in children, each watched; the results, old ones included."""
    done = _read(state)
    while len(done) < inputs:
        first = len(done)
        _run_child(range(first, min(first + AT_ONCE, inputs)), seed, corpus, scratch, state)
        done = _read(state)
    return done[:inputs]


def _read(state: Path) -> list[dict[str, Any]]:
    if not state.exists():
        return []
    return [json.loads(line) for line in state.read_text().splitlines()]


def in_child(work: Callable[[], object]) -> int:
    """Do something in a child; its status."""
    child = start_child(work)
    return os.waitpid(child, 0)[1]


def start_child(work: Callable[[], object]) -> int:
    """A forked process that does `work` and ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    return child


def _run_child(numbers: range, seed: int, corpus: Path, scratch: Path, state: Path) -> None:
    """A child for some inputs. When it hangs or dies, that input has failed, and this returns."""

    def work() -> None:
        with state.open("a") as log:
            for number in numbers:
                result = run_input(number, seed, corpus, scratch / "run")
                log.write(json.dumps(vars(result)) + "\n")
                log.flush()

    child = start_child(work)
    seen, since = -1, time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        size = state.stat().st_size if state.exists() else 0
        if size != seen:
            seen, since = size, time.monotonic()
        if ended == 0 and time.monotonic() - since < 2 * PATIENCE * SECONDS:
            time.sleep(0.2)
            continue
        if ended == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if ended == 0 or status:
            reason = (
                "hang: not even an alarm ended it" if ended == 0 else f"signal: status {status}"
            )
            number = len(_read(state))
            command = " ".join(choose(number, seed)[0].words)
            with state.open("a") as log:
                log.write(json.dumps(vars(Result(number, command, failure=reason))) + "\n")
        return


def choose(number: int, seed: int) -> tuple[Case, random.Random]:
    """The case of an input, and the generator that decides its changes."""
    rng = random.Random(f"{seed}/{number}")
    return rng.choices(CASES, [case.weight for case in CASES])[0], rng


def run_input(number: int, seed: int, corpus: Path, place: Path) -> Result:
    """Copy, change, run, look."""
    case, rng = choose(number, seed)
    result = Result(number, " ".join(case.words))
    _remove(place)
    work, outside = place / "work", place / "outside"
    outside.mkdir(parents=True)
    for name in ("thesis.txt", "photo.png"):
        (outside / name).write_text("mine")
    (outside / "folder").mkdir()
    for name in dict.fromkeys(case.inputs):
        copy = shutil.copytree if (corpus / name).is_dir() else shutil.copy
        work.mkdir(exist_ok=True)
        copy(corpus / name, work / name)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if files := _files(work, case.changed):
            path = rng.choice(files)
            if rng.random() < 0.06 and path.parent != work:
                how = mutate_folder(path.parent, rng, outside)
            else:
                how = mutate(path, rng, outside)
            result.changes.append(f"{path.relative_to(work)}: {how}")
    words = [*case.words, *more_words(case.words, rng)]
    result.command = " ".join(words)
    before = {**_snapshot(outside, ()), **_snapshot(work, case.outputs)}
    start = time.process_time()
    result.status, result.failure = _run(words, work)
    result.seconds = round(time.process_time() - start, 3)  # of the processor
    after = {**_snapshot(outside, ()), **_snapshot(work, case.outputs)}
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed and result.failure is None:
        result.failure = f"changed: {changed[:3]}"
    return result


def _files(work: Path, names: tuple[str, ...]) -> list[Path]:
    roots = [work / name for name in names if not (work / name).is_symlink()]
    files = [path for root in roots for path in (root, *root.rglob("*"))]
    return sorted(path for path in files if path.is_file() and not path.is_symlink())


class TooLong(BaseException):
    """The alarm."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooLong


def _run(words: list[str], work: Path) -> tuple[int | None, str | None]:
    """The command in this process: its status, and what is wrong with how it ended."""
    from lydite.cli.main import main as command

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    status: int | None = None
    failure: str | None = None
    kept = sys.argv, os.getcwd()
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _alarm)
    os.chdir(work)
    sys.argv = ["lydite", *words]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(PATIENCE * SECONDS)
    try:
        with _limited_memory(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                command()
            failure = f"warning: {shown[0].message}" if shown else None
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except TooLong:
        failure = "slow: more than ten seconds"
    except BaseException as error:  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = (
            f"traceback: {type(error).__name__}: {error!s:.120} ({place.filename}:{place.lineno})"
        )
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.argv = kept[0]
        os.chdir(kept[1])
    if failure is None and status not in STATUSES:
        failure = f"status: {status}"
    text = _text(out) + _text(err)
    if failure is None and any(letter < " " and letter not in "\t\n" for letter in text):
        failure = f"control: {text[:200]!r}"
    if failure is None and ("Traceback" in text or "not enough memory" in text):
        failure = f"printed: {text[-200:]!r}"
    return status, failure


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """No more address space than now and the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _snapshot(root: Path, without: tuple[str, ...]) -> dict[str, str]:
    """Kind, size and content of every file; not of outputs."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if name.parts[0].removesuffix(".moved") in without:  # an output may be named by a link
            continue
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode) and status.st_size < 2**24:
            content = hashlib.md5(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        found[f"{root.name}/{name}"] = f"{stat.S_IFMT(status.st_mode)} {status.st_size} {content}"
        if stat.S_ISDIR(status.st_mode):
            found[f"{root.name}/{name}"] = "folder"
    return found


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)


def make_corpus(folder: Path) -> Path:
    """Good files of every kind, made by the commands themselves."""
    import numpy as np

    from lydite.core.tensorfile import TensorFile, save
    from untrained_sd3 import TRANSFORMER, make_untrained

    folder.mkdir(parents=True)
    tiny = replace(
        TRANSFORMER, num_layers=1, num_attention_heads=1, caption_projection_dim=32, sample_size=4,
        pos_embed_max_size=4,
    )  # fmt: skip
    make_untrained(folder / "model", transformer=tiny, clip_layers=1)
    small = " ".join(MODEL)
    for ending in ("png", "jpg", "webp"):
        _make(folder, f"generate star {small} -o picture.{ending}")
    _make(folder, f"generate ring {small} -o photo.png")
    shutil.copy(folder / "picture.jpg", folder / "photo.jpg")
    points = "--points pipeline/* --points transformer/*.0* --points vae/decoder.conv*"
    for name in ("ref", "port", "floor", "run"):
        _make(folder, f"trace star {small} -o {name} {points}")
    shutil.copytree(folder / "model", folder / "changed")
    (weights,) = (folder / "changed" / "vae").glob("*.safetensors")
    with TensorFile.open(weights) as file:
        tensors = {name: file.read(name) for name in file.header.tensors}
    save(weights, {**tensors, "decoder.conv_in.bias": tensors["decoder.conv_in.bias"] + 1})
    _make(folder, f"trace star {small} -o wrong {points}".replace("-m model", "-m changed"))
    _make(folder, "audit model --digests digests.json")
    _make(folder, "sampler conform --write problem.json --steps 3 --sampler heun")
    (folder / "answer.json").write_text(
        json.dumps({"x": [[0.5] * 24] * 3, "sigma": [1.0, 0.5, 0.1]})
    )
    for name in ("photos", "drawn"):
        (folder / name).mkdir()
        shutil.copy(folder / "photo.png", folder / name / "a.png")
        shutil.copy(folder / "picture.png", folder / name / "b.png")
        np.savez(folder / f"{name}.npz", np.zeros((2, 32, 32, 3), np.uint8))
    layer = "transformer.transformer_blocks.0.attn.to_q"
    lora = {f"{layer}.lora_A.weight": (2, 32), f"{layer}.lora_B.weight": (32, 2)}
    save(
        folder / "lora.safetensors",
        {name: np.ones(shape, np.float32) for name, shape in lora.items()},
    )
    renames = {"old_name": "pipeline/noise", "other": {"ref": "pipeline/image", "dims": "hwc"}}
    (folder / "map.json").write_text(json.dumps(renames))
    (folder / "prompts.txt").write_text("a red star\na blue ring\n")
    (folder / "prompts.csv").write_text('id,prompt\n1,a red star\n2,"a ring, blue"\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "a red star"}\n{"prompt": "a ring"}\n')
    run = f"calibrate run --prompts prompts.txt {' '.join(MODEL[:-2])} --steps 2 --conditioning"
    _make(folder, f"{run} --out set")
    _make(folder, f"{run} --out other -s 7")
    shutil.copytree(folder / "set", folder / "again")
    for name in ("set", "other"):
        text = json.loads((folder / name / "set.json").read_text())
        assert text["settings"]["model"]
    _make(folder, "calibrate export set --out npz")
    _make(folder, "calibrate activations set -m model --out stats.sqlite")
    for bits in "43":
        _make(folder, f"{_QUANTIZE} --set set --out q{bits}".replace("bits 4", f"bits {bits}"))
    _make(folder, "quantize plan model --bits 4 --group 32 --save plan.json")
    _make(folder, "quantize plan model --set set --bpw 5 --group 32 --images 1 --sensitivity "
                  "measured.json")  # fmt: skip
    manifest = json.loads((folder / "npz" / "manifest.json").read_text())
    (folder / "settings.json").write_text(json.dumps(manifest["lydite"]))
    return folder


def _make(folder: Path, command: str) -> None:
    status, failure = _run(command.split(), folder)
    if failure or status != 0:
        raise SystemExit(f"{command}: {status} {failure}")


if __name__ == "__main__":
    main()
