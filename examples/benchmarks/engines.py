"""Octavo beside the engines that people would use instead: the same prompts, weights, precision, threads and machine.

    python examples/benchmarks/peers/install.py                            # once: their environments
    python examples/benchmarks/engines.py                                  # all engines, W1 to W8, three rounds
    python examples/benchmarks/engines.py --peers octavo,vllm --workloads W1,W4 --rounds 5
    python examples/benchmarks/engines.py --dtype float32                  # where bfloat16 is slow
    python examples/benchmarks/engines.py --quick                          # small and rough: does everything run?
    python examples/benchmarks/engines.py --json FILE --plot FILE

SmolLM2-135M-Instruct in bfloat16 or float32, cache included (llama.cpp: weights in bfloat16 and cache in float16 either
way), greedy (several samples of one prompt at temperature 1), fixed lengths, prompts as token ids. Each engine is a
process of its own, and all others stand still while it is measured. In every round each workload goes around all
engines, each round begins with another one, and each brings token ids that no engine has seen. A cell is the median of
the rounds and their range: generated tokens per second from the first request to the last token; in W6 seconds to the
first token.

Everyone has a cache for the same number of tokens, with prefix caching where the engine has any; in W2 without. Engines
are opened anew for W2 and for W8. *agree*: how often the first token of an answer is that of octavo (bfloat16 rounds).
W7 counts the tokens of all four beams. *best* in the last column is the fastest peer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

if TYPE_CHECKING:
    from octavo.examples.benchmarks.findings import Findings, picture, ratios, table, targets
    from octavo.examples.benchmarks.peers.catalogue import Peer, default_folder, peers
    from octavo.examples.benchmarks.peers.driver import Dtype, Opening
    from octavo.examples.benchmarks.peers.install import demo_weights
    from octavo.examples.benchmarks.peers.process import PeerFailed, PeerProcess, Run
    from octavo.examples.benchmarks.report import Report, parser_of, this_machine, turns
    from octavo.examples.benchmarks.workloads import Setting, Workload, workloads
else:
    FOLDER = Path(__file__).parent  # neither this folder nor that of the peers is a package
    sys.path[:0] = [str(FOLDER), str(FOLDER / "peers")]
    from catalogue import Peer, default_folder, peers
    from driver import Dtype, Opening
    from findings import Findings, picture, ratios, table, targets
    from install import demo_weights
    from process import PeerFailed, PeerProcess, Run
    from report import Report, parser_of, this_machine, turns
    from workloads import Setting, Workload, workloads

T = TypeVar("T", Peer, Workload)
MAX_RUNNING = 64
"""Sequences at the same time, for everyone."""
ROUNDS, QUICK_ROUNDS = 3, 1
QUICK_BY = 8
"""How much smaller everything is with ``--quick``."""
THREADS = 2
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and how."""

    contenders: Sequence[Peer]
    tasks: Sequence[Workload]
    rounds: int
    folder: Path
    model: Path
    dtype: Dtype
    threads: int

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows."""
        config = msgspec.json.decode((self.model / "config.json").read_bytes(), type=dict[str, msgspec.Raw])
        return msgspec.json.decode(config["vocab_size"], type=int)

    def opening(self, peer: Peer, setting: Setting) -> Opening:
        """How ``peer`` is opened for workloads of this setting."""
        model = self.folder / peer.prepared if peer.prepared else self.model
        return Opening(
            str(model),
            self.dtype,
            setting.pool_tokens,
            setting.caching,
            setting.tiers,
            self.threads,
            peer.batch_tokens,
            MAX_RUNNING,
            peer.variant,
        )


# measuring


def measure(plan: Plan) -> Findings:
    """Everything, one setting after the other."""
    findings = Findings()
    for setting, tasks in groupby(sorted(plan.tasks, key=_by_setting), key=lambda task: task.setting):
        with ExitStack() as stack:
            measure_setting(plan, setting, list(tasks), findings, stack)
    return findings


def _by_setting(task: Workload) -> tuple[bool, bool, int]:
    return task.setting.tiers, not task.setting.caching, -task.setting.pool_tokens


def measure_setting(
    plan: Plan, setting: Setting, tasks: Sequence[Workload], findings: Findings, stack: ExitStack
) -> None:
    """Open all engines, go around, and close them with ``stack``."""
    able = [peer for peer in plan.contenders if peer.tiers or not setting.tiers]
    running = [process for peer in able if (process := _opened(plan, peer, setting, findings, stack)) is not None]
    hopeless: set[tuple[str, str]] = set()
    pairs = [(task, process) for task in tasks for process in running]
    order = turns(pairs, plan.rounds, name=lambda pair: f"{pair[0].name} {pair[1].peer.name}")
    for at, (task, process) in enumerate(order):
        if (task.name, process.peer.name) in hopeless:
            continue
        try:
            for row, run in _runs(task, process, at // len(pairs), plan.vocabulary):
                findings.runs[row, process.peer.name].append(run)
        except PeerFailed as error:
            hopeless.add((task.name, process.peer.name))
            findings.notes.append(f"{process.peer.name} does no {task.name}: {error}")


def _opened(plan: Plan, peer: Peer, setting: Setting, findings: Findings, stack: ExitStack) -> PeerProcess | None:
    if missing := peer.missing(plan.folder):
        findings.notes.append(f"{peer.name} is not here: run peers/install.py (no {', '.join(missing)})")
        return None
    process = PeerProcess(peer, plan.folder, plan.threads)
    stack.callback(process.close)
    try:
        process.open(plan.opening(peer, setting))
    except PeerFailed as error:
        findings.notes.append(f"{peer.name} does not open with {setting}: {error}")
        return None
    return process


def _runs(task: Workload, process: PeerProcess, turn: int, vocabulary: int) -> Iterator[tuple[str, Run]]:
    """The rows that one run of a workload fills."""
    lanes = task.lanes(turn, vocabulary)
    yield (f"{task.name} cold" if task.repeats else task.name), process.run(lanes)
    if task.repeats:
        yield f"{task.name} cached", process.run(lanes)


# the report


def report(plan: Plan, findings: Findings) -> Report:
    """Everything that was found."""
    numbers = {row: {name: findings.spread(row, name) for name in findings.contenders()} for row in findings.rows()}
    packages = ("octavo", "torch", "transformers", "numpy")
    engines = [f"{peer.name}: {', '.join(peer.packages)}" for peer in plan.contenders if peer.packages]
    return Report(
        "engines",
        this_machine(plan.threads, packages),
        [sheet for sheet in (table(plan.tasks, findings), ratios(findings)) if sheet.rows],
        numbers,
        targets(plan.tasks, findings),
        [plan.dtype, *findings.notes, *engines],
    )


def plan_of(arguments: Sequence[str] | None) -> tuple[Plan, Path | None, Path | None]:
    """What the command line asks for, and where JSON and picture go."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", help="names, with commas between them; default: all")
    parser.add_argument("--workloads", help="the same, such as W1,W4")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of install.py; default: %(default)s")
    parser.add_argument("--model", type=Path, help="a folder of safetensors, for engines that read those")
    chosen = parser.parse_args(arguments)
    tasks = _chosen(parser.error, workloads(), chosen.workloads)
    plan = Plan(
        contenders=_chosen(parser.error, peers(), chosen.peers),
        tasks=[task.smaller(QUICK_BY) for task in tasks] if chosen.quick else tasks,
        rounds=chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS),
        folder=chosen.folder,
        model=chosen.model or demo_weights(),
        dtype=chosen.dtype,
        threads=chosen.threads,
    )
    return plan, chosen.json, chosen.plot


def _chosen(fail: Callable[[str], NoReturn], known: Sequence[T], names: str | None) -> Sequence[T]:
    """Those of ``known`` that are named, all if nothing is."""
    if names is None:
        return known
    wanted = [name.strip() for name in names.split(",")]
    if strangers := set(wanted) - {each.name for each in known}:
        fail(f"no {', '.join(sorted(strangers))}; there are {', '.join(each.name for each in known)}")
    return [each for each in known if each.name in wanted]


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    plan, json, plot = plan_of(arguments)
    findings = measure(plan)
    found = report(plan, findings)
    found.show()
    found.save(json)
    if plot is not None and findings.runs:
        picture(findings, f"{plan.dtype}, {plan.threads} threads", plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
