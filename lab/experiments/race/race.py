"""The race: ours and the other sparse and dense attention kernels on the same inputs of one GPU.

    python3 lab/experiments/race/race.py --out ROWS.jsonl [--seconds 240] [--only TEXT]

Each rival of rivals.py has a process of its own. First they are checked side by side: the error of o, dq, dk and dv
against the definition in f64, and whether 100 passes are equal to the bit. Then one after another is timed while the
others are stopped, the lengths and heads that matter most first, and some also by what a call costs the host; then odd
shapes, side by side again. Every row is written at once, so that a run that is cut off keeps what it has. What fails,
refuses or comes too late is a row too.

`--device cpu` tries the script without a GPU: ours by the definitions, rivals replaced by plain torch, short rows.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
# Folders of PYTHONPATH run no .pth files, and nvidia-cutlass-dsl relies on one.
DSL = "nvidia_cutlass_dsl/dsl_packages"
sys.path += [path for folder in sys.path if os.path.isdir(path := os.path.join(folder, DSL))]

# Heads and tokens that are timed, the most telling first.
ROUNDS = [((16, 8), 32768), ((64, 4), 32768), ((16, 8), 8192), ((64, 4), 8192), ((16, 16), 32768), ((32, 2), 32768),
          ((128, 1), 32768), ((16, 8), 131072), ((64, 4), 131072)]
# Heads and tokens whose results are compared with the definition.
CHECKED = [((16, 8), 8192), ((64, 4), 4096), ((16, 16), 2048), ((32, 2), 2048), ((128, 1), 2048)]
REPEATS = 100
# By name: tokens and documents.
ODD = {"507 tokens": (507, None), "one key": (1, None), "empty documents": (507, [0, 100, 100, 357, 507, 507])}
# Cached tokens and heads of a decoding step, of these tasks.
STEP_TOKENS, STEP_HEADS, STEP_TASKS = (8192, 32768, 131072), ((16, 8), (16, 1)), ("bands", "dense", "window")
TOLERANCE = 0.02  # of the norms: right is below it
# Tokens of a call whose time on the host is taken, of these tasks; how many calls, so many behind each other.
HOST_TOKENS, HOST_TASKS, HOST_CALLS, HOST_BURST = 256, ("dense", "selected", "tiles"), 1000, 40
SIDE_BY_SIDE = 24  # processes that are checked at once
PACKAGES = ["torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "flash-sparse-attn", "fla-core", "attn-gym",
            "flash-msa", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13"]


def heads_of(task, rival, heads, tokens):
    """The heads that are taken in place of `heads`; None where the shape is left out."""
    if heads == (16, 16):  # cuDNN's backward pass by tiles takes no groups.
        return heads if task == "tiles" and rival != "FlexAttention" else None
    if task == "shared":
        return (64, 1) if heads == (64, 4) else None
    if task == "bands" or "MassAlloc" in rival:  # One KV head of eight, as eight GPUs divide a layer.
        return {(16, 8): heads, (128, 1): (16, 1) if task == "bands" else None}.get(heads)
    if rival == "FlexAttention" and ((heads, tokens) not in [*ROUNDS[:3], *CHECKED[:2]]):
        return None  # Each shape is compiled anew.
    if rival == "cuDNN frontend" and heads != (16, 8) or task == "dense" and (heads, tokens) == ROUNDS[-1]:
        return None
    return None if task == "own" and (heads, tokens) in ROUNDS[4:] else heads


def small_heads(task, rival):
    """The heads of odd shapes and of calls whose time on the host is taken."""
    if task == "shared":
        return (64, 1)
    return (16, 16) if rival == "cuDNN frontend" else (64, 4) if "NSA" in rival else (16, 8)


def words(error):
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- one rival, in a process of its own
class Racer:
    def __init__(self, rival, task, arguments, tell):
        """`tell`: a function that gets each row. On a CPU Sieve runs by its
        definitions, and plain torch in place of all others."""
        import torch
        import problems
        import rivals

        self.torch, self.problems, self.tell = torch, problems, tell
        self.not_offered = rivals.NotOffered
        self.rival, self.task, self.device, self.shrink = rival, task, arguments.device, arguments.shrink
        self.build = rivals.RIVALS[rival, task]
        if self.device == "cpu":
            self.build = self.build if rival.startswith("Sieve") else plain
            with contextlib.suppress(ImportError):
                import sieve_attention

                sieve_attention.on_cpu()

    def row(self, kind, problem, **values):
        documents = {"documents": problem["documents"]} if problem.get("documents") else {}
        heads = "{}/{}".format(*problem["heads"])
        self.tell({"kind": kind, "rival": self.rival, "task": self.task, "heads": heads, "tokens": problem["tokens"]}
                  | documents | values)

    def guarded(self, kind, shape, run):
        """Runs one part; what it raises is its row. Returns whether it ended well."""
        try:
            self.row(kind, shape, **run(self.made(shape)))
            return True
        except self.not_offered as why:
            self.row("not offered", shape, of=kind, why=str(why))
        except Exception as error:
            self.row("refused", shape, of=kind, why=words(error))
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise SystemExit(f"{self.rival}: the GPU's context is lost") from error
        finally:
            self.free()
        return False

    def free(self):
        import gc

        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def made(self, shape):
        tokens = max(shape["tokens"] // self.shrink, 1) if shape["tokens"] > 1000 else shape["tokens"]
        problem = self.problems.Problem(self.task, *shape["heads"], tokens, shape.get("documents"), self.device)
        return problem, self.build(problem)

    def passes(self, problem, call):
        o = call(problem.q, problem.k, problem.v)
        return [o, *self.torch.autograd.grad(o, problem.inputs, problem.do)]

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    # The commands.
    def warm(self, shapes):
        """Compiles what the shapes need, on short rows."""
        for heads in shapes:
            with contextlib.suppress(Exception):  # A row says so when it is timed.
                self.passes(*self.made({"heads": heads, "tokens": 512}))
            self.free()
        with contextlib.suppress(Exception):
            self.passes(*self.made(self.host_shape()))
        self.free()
        self.wait()

    def check(self):
        """Rows of errors at each number of heads in CHECKED and of repeated passes at the first that
        runs; also compiles what is timed later."""
        took_one = False
        for heads, tokens in CHECKED:
            if heads := heads_of(self.task, self.rival, heads, tokens):
                shape = {"heads": heads, "tokens": tokens}
                if self.task != "own":
                    self.guarded("error", shape, self.errors)
                if not took_one:
                    took_one = self.guarded("repeats", shape, self.repeats)
        if self.task in HOST_TASKS:  # Compiled here, since times are taken one rival after another.
            with contextlib.suppress(Exception):
                self.passes(*self.made(self.host_shape()))
            self.free()
        for heads in STEP_HEADS if self.builds_steps() else []:
            with contextlib.suppress(Exception):
                self.builds_steps()(self.made({"heads": heads, "tokens": 32768})[0])()
            self.free()
        if self.rival == "FlexAttention":
            for heads, tokens in ROUNDS:
                if heads := heads_of(self.task, self.rival, heads, tokens):
                    with contextlib.suppress(Exception):  # A row says so when it is timed.
                        self.passes(*self.made({"heads": heads, "tokens": tokens}))
                    self.free()
        self.wait()

    def errors(self, made):
        computed, wanted = self.passes(*made), self.problems.definition(made[0])
        names = ["o", "dq", "dkv"] if self.task == "shared" else ["o", "dq", "dk", "dv"]
        unit = made[0].do
        return {name: float(f"{self.problems.distance(x, y, unit):.3g}") for name, x, y in zip(names, computed, wanted)}

    def repeats(self, made):
        once = self.passes(*made)
        equal = [all(map(self.torch.equal, once, self.passes(*made))) for _ in range(REPEATS - 1)]
        return {"passes": REPEATS, "equal": 1 + sum(equal)}

    def odd(self):
        if self.task == "own":
            return
        heads = small_heads(self.task, self.rival)
        for name, (tokens, documents) in ODD.items():
            shape = {"heads": heads, "tokens": tokens, "documents": documents}
            self.guarded("odd", shape, lambda made, name=name: {"case": name} | self.verdict(made))

    def verdict(self, made):
        errors = self.errors(made)
        return {"verdict": "right" if all(x < TOLERANCE for x in errors.values()) else "wrong"} | errors

    def time(self, heads, tokens):
        self.guarded("time", {"heads": heads, "tokens": tokens}, self.times)

    def builds_steps(self):
        """The function that makes the rival's decoding step; None where it has none, as on a CPU all but ours."""
        import rivals

        is_there = self.device == "cuda" or self.rival.startswith("Sieve")
        return rivals.STEPS.get((self.rival, self.task)) if is_there else None

    def steps(self):
        """Rows of a decoding step at each of STEP_TOKENS, and its error against f64."""
        build = self.builds_steps()
        for heads in STEP_HEADS if build else []:
            for tokens in STEP_TOKENS:
                shape = {"heads": heads, "tokens": max(tokens // self.shrink, 1)}
                self.guarded("step", shape, lambda made: self.step(made[0], build(made[0])))

    def step(self, problem, run):
        """The times of a step in us, and the error of its output."""
        least, middle, runs = self.milliseconds(run)
        error = self.problems.distance(run(), self.problems.last_row(problem), problem.do)
        row = {"us": round(1e3 * middle, 2), "least_us": round(1e3 * least, 2), "runs": runs}
        return row | {"o": float(f"{error:.3g}")}

    def host_shape(self):
        return {"heads": small_heads(self.task, self.rival), "tokens": HOST_TOKENS}

    def host(self):
        self.guarded("host", self.host_shape(), self.host_times)

    def host_times(self, made):
        """Microseconds of the host, the median of HOST_CALLS calls (on a CPU of one burst), the GPU kept busy so that
        nothing waits for it."""
        row, bursts = {}, HOST_CALLS // HOST_BURST if self.device == "cuda" else 1
        for name, run in (("forward", self.without_gradients(*made)), ("both", lambda: self.passes(*made))):
            for _ in range(20 if self.device == "cuda" else 1):
                run()
            clock = []
            for _ in range(bursts):
                self.wait()
                if self.device == "cuda":
                    self.torch.cuda._sleep(40_000_000)
                for _ in range(HOST_BURST):
                    began = time.perf_counter()
                    run()
                    clock.append(time.perf_counter() - began)
            row[f"{name}_us"] = round(1e6 * statistics.median(clock), 1)
        return row | {"calls": len(clock)}

    def without_gradients(self, problem, call):
        def forward():
            with self.torch.no_grad():
                call(problem.q, problem.k, problem.v)

        return forward

    def times(self, made):
        """The times of a forward pass without gradients and of both passes in
        ms, and the most MiB that both passes take."""
        problem, call = made
        row, forward = {}, self.without_gradients(problem, call)
        if self.task == "bands":
            row["share"] = round(problem.share(), 4)
        for name, run in (("forward", forward), ("both", lambda: self.passes(problem, call))):
            least, middle, runs = self.milliseconds(run)
            row |= {f"{name}_ms": round(middle, 4), f"{name}_least_ms": round(least, 4), f"{name}_runs": runs}
        if self.device == "cuda":
            cuda = self.torch.cuda
            cuda.empty_cache()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
            self.passes(problem, call)
            row["peak_mib"] = round((cuda.max_memory_allocated() - before) / 2**20, 1)
        return row

    def milliseconds(self, run):
        """Least and median time of a call and how many were timed, the L2 flushed before each."""
        run()
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        runs = min(max(int(0.3 / (time.perf_counter() - began)), 3), 15)
        if self.device == "cpu":
            clock = [time.perf_counter()]
            for _ in range(runs):
                run()
                clock.append(time.perf_counter())
            return *least_and_median([1e3 * (b - a) for a, b in zip(clock, clock[1:])]), runs
        torch = self.torch
        flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for begin, end in events:
            flush.zero_()
            torch.cuda._sleep(4_000_000)  # The host gets ahead meanwhile, so that launches are not timed.
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return *least_and_median([begin.elapsed_time(end) for begin, end in events]), runs


def least_and_median(times):
    return min(times), statistics.median(times)


def plain(problem):
    """The definition in torch, in place of a rival where there is no GPU."""
    import torch

    def call(q, k, v):
        """o in f32 a head at a time, cast to q's type; a query that sees no key gets 0."""
        rows, (wide_q, wide_k, wide_v) = [], (x[0].float() for x in (q, k, v))
        for head in range(problem.heads):
            kv_head = head // problem.group
            logits = wide_q[:, head] @ wide_k[:, kv_head].T * q.shape[-1] ** -0.5
            if problem.task == "expiring":
                logits = logits + problem.rank[0, kv_head]
            visible = problem.sees(0, problem.tokens, head)
            weights = logits.masked_fill(~visible, -1e30).softmax(-1) * visible.any(-1, keepdim=True)
            rows.append(weights @ wide_v[:, kv_head])
        return torch.stack(rows, 1)[None].to(q.dtype)

    return call


def serve(arguments):
    """Reads a command a line from standard input, writes rows and then {"done": ...} to standard output."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What a package prints goes to the log.

    def tell(row):
        out.write(json.dumps(row) + "\n")
        out.flush()

    rival, task = arguments.worker.split("|")
    racer = Racer(rival, task, arguments, tell)
    for line in sys.stdin:
        command, *rest = json.loads(line)
        getattr(racer, command)(*rest)
        tell({"done": command})


# ---- all of them
class Worker:
    """A rival's process. It is alone in its process group, so that it is stopped together with its compilers."""

    def __init__(self, rival, task, race, heads=None):
        """Starts the process; `heads`: the only ones it is timed with, None for
        all. Its errors go to a file of its own."""
        self.rival, self.task, self.race, self.name = rival, task, race, f"{rival}|{task}"
        self.heads = heads  # the only ones that it is timed with; None is all
        self.done, self.at_work, self.alive, self.checked = queue.Queue(), [], True, False
        label = f"{rival}-{task}{heads or ''}".replace(" ", "_").replace("'", "").replace(",", "")
        self.log = race.logs / f"{label}.txt"
        command = [sys.executable, str(HERE / "race.py"), "--worker", self.name, "--device",
                   race.arguments.device, "--shrink", str(race.arguments.shrink)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, process_group=0, **pipes)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        """Passes the process's rows on and queues the name of each command that ended, None once the process has."""
        for line in self.process.stdout:
            row = json.loads(line)
            if "done" in row:
                self.done.put(row["done"])
            else:
                self.race.write(row)
        self.done.put(None)

    def send(self, *command):
        self.at_work.append(command[0])
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def finished(self, seconds):
        """Whether the oldest command under way ends within the seconds; a process that has ended gets a row."""
        try:
            ended = self.done.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return False
        if ended is None:
            self.lost(f"its process ended, {self.last_words()}")
        else:
            self.at_work.remove(ended)
            self.checked |= ended in ("check", "warm")
        return True

    def last_words(self):
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"

    def late(self, number, why):
        self.race.write({"kind": "late", "rival": self.rival, "task": self.task, "of": number, "why": why})

    def lost(self, why):
        if self.alive:
            self.late(self.at_work[0] if self.at_work else "start", why)
        self.alive, self.at_work = False, []
        self.signal(signal.SIGKILL)

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Race:
    def __init__(self, arguments, field):
        self.arguments, self.field, self.began = arguments, field, time.monotonic()
        self.logs = arguments.out.parent / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.lock, self.rows = threading.Lock(), arguments.out.open("a", encoding="utf-8")
        self.workers = []

    def left(self):
        return self.arguments.seconds - (time.monotonic() - self.began)

    def write(self, row):
        with self.lock:
            self.rows.write(json.dumps(row | {"second": round(time.monotonic() - self.began, 1)}) + "\n")
            self.rows.flush()
            print(json.dumps(row), flush=True)

    def run(self):
        """The whole race in its order: checks, times, odd shapes, then times of rivals that were checked late. In the
        end all processes are killed; those still at work get a row."""
        self.write(about(self.arguments))
        try:
            self.check()
            ready = [worker for worker in self.workers if worker.checked]
            texts = [text for text in self.arguments.first.split(",") if text]
            early = [worker for worker in ready if any(text in worker.name for text in texts)]
            for workers in (early, [worker for worker in ready if worker not in early]):
                self.time(workers, self.arguments.odd)
            if not self.arguments.times_only:
                self.odd()
            late = [worker for worker in self.workers if not worker.checked and worker.alive]
            self.await_all(late, self.left() / 2)
            self.time([worker for worker in late if worker.checked], 2.0)
        finally:
            for worker in self.workers:
                if worker.alive and worker.at_work:
                    worker.lost(f"{self.arguments.seconds:.0f} s were over")
                worker.signal(signal.SIGKILL)
        self.write({"kind": "end", "seconds": round(time.monotonic() - self.began, 1)})

    def check(self):
        """Starts the rivals in their order, as many at once as there are places, and awaits their checks."""
        waiting, end = list(self.field), time.monotonic() + self.arguments.prepare
        while time.monotonic() < end and self.left() > 0:
            busy = [worker for worker in self.workers if worker.alive and worker.at_work]
            while waiting and len(busy) < SIDE_BY_SIDE:
                rival, task, heads = waiting.pop(0)
                worker = Worker(rival, task, self, heads)
                if self.arguments.times_only:
                    shapes = (heads_of(task, rival, *shape) for shape in ROUNDS)
                    worker.send("warm", [heads] if heads else list(dict.fromkeys(filter(None, shapes))))
                else:
                    worker.send("check")
                self.workers.append(worker)
                busy.append(worker)
            if not busy:
                break
            for worker in busy:
                worker.finished(0.02)
        for rival, task, _ in waiting:
            self.write({"kind": "late", "rival": rival, "task": task, "of": "start", "why": "no time was left"})

    def await_all(self, workers, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and (busy := [worker for worker in workers if worker.alive and worker.at_work]):
            for worker in busy:
                worker.finished(0.05)

    def time(self, ready, reserve):
        """Times one rival after another, all others stopped, until `reserve` seconds are left: their calls on the host
        first, then one shape after another."""
        for worker in self.workers:
            worker.signal(signal.SIGSTOP)
        for worker in ready:
            if worker.task in HOST_TASKS and worker.heads in (None, small_heads(worker.task, worker.rival)):
                self.alone(worker, reserve, "host")
        for heads, tokens in ROUNDS:
            for worker in ready:
                taken = heads_of(worker.task, worker.rival, heads, tokens)
                if taken and worker.heads in (None, taken):
                    self.alone(worker, reserve, "time", taken, tokens)
        for worker in ready:
            if worker.task in STEP_TASKS and worker.heads in (None, small_heads(worker.task, worker.rival)):
                self.alone(worker, reserve, "steps")
        for worker in self.workers:
            worker.signal(signal.SIGCONT)

    def alone(self, worker, reserve, command, *shape):
        """Lets one worker do a command while all others are stopped; one that takes too long gets no further one."""
        if not worker.alive or worker.at_work or self.left() < reserve:
            return
        worker.signal(signal.SIGCONT)
        worker.send(command, *shape)
        limit = self.arguments.limit
        if not worker.finished(min(limit, self.left())):
            place = "{}/{} heads, {} tokens".format(*shape[0], shape[1]) if shape else "on the host"
            worker.late(command, f"{place}: no times within {limit:.0f} s, and none of later shapes")
        worker.signal(signal.SIGSTOP)

    def odd(self):
        checked = [worker for worker in self.workers if worker.checked and worker.alive]
        for worker in checked:
            worker.send("odd")
        self.await_all(checked, self.left() - 3.0)


def command_of(arguments):
    """The command, without folders."""
    only = f" --only {arguments.only.replace(' ', '_')}" if arguments.only else ""
    limit = f" --limit {arguments.limit:.0f}" if arguments.limit != 15 else ""
    return f"python3 lab/experiments/race/race.py --out ROWS.jsonl{only} --seconds {arguments.seconds:.0f}{limit}"


def about(arguments):
    """What was raced on, for the page."""
    row = {"kind": "about", "device": arguments.device, "date": datetime.date.today().isoformat(),
           "seconds": arguments.seconds, "command": command_of(arguments),
           "commit": os.environ.get("COMMIT", "")}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            row[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        row["card"], row["driver"] = said.splitlines()[0].split(", ")
    return row


def split(field):
    """Rivals with the heads of each of their processes: FlashAttention-4 compiles each number of them anew."""
    for rival, task in field:
        shapes = dict.fromkeys(filter(None, (heads_of(task, rival, *shape) for shape in ROUNDS)))
        yield from ((rival, task, heads) for heads in (shapes if "FlashAttention" in rival else [None]))


def main():
    """With --worker serves one rival's commands; else races all rivals that --only names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("race.jsonl"), help="rows are added here")
    parser.add_argument("--seconds", type=float, default=240.0, help="the whole run ends by then")
    parser.add_argument("--prepare", type=float, default=95.0, help="of them at most for the checks")
    parser.add_argument("--odd", type=float, default=35.0, help="of them left for odd shapes")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for one rival's times of one shape")
    parser.add_argument("--only", default="", help="rivals whose name or task has one of these: A,B")
    parser.add_argument("--first", default="", help="rivals that are timed before all others, named as by --only")
    parser.add_argument("--times-only", action="store_true", help="no checks and no odd shapes; slow compilers side by "
                        "side, a process for each number of heads")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divides the numbers of tokens over 1000")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments)
        return
    import rivals

    wanted = [text for text in arguments.only.split(",") if text] or [""]
    field = [key for key in rivals.RIVALS if any(text in "|".join(key) for text in wanted)]
    if not field:
        names = ", ".join(sorted({rival for rival, _ in rivals.RIVALS}))
        parser.error(f"--only: no rival's name or task holds {arguments.only}\n  hint: rivals are {names}")
    race = Race(arguments, split(field) if arguments.times_only else [(*key, None) for key in field])
    for (rival, task), why in rivals.ABSENT.items():
        race.write({"kind": "absent", "rival": rival, "task": task, "why": why})
    race.run()


if __name__ == "__main__":
    main()
