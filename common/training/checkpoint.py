"""Save and load the training state, for `--checkpoint` and `--continue`.

torch.distributed.checkpoint (DCP) writes and reads the files. A checkpoint contains the fp32
masters, the optimizer's state under the names of its update rule, the FP8 scales and histories, and
the random generators. The data need only the number of steps, because their order is a function of
the seed. A frozen base is not saved but loaded again.

Each rank writes its own tensors in DCP's safetensors layout
(torch.distributed.checkpoint.HuggingFaceStorageWriter). DCP's other layout is pickle, which can
execute code from a file. DCP re-shards tensors for a different number of ranks. facts.json has a
digest of all values that any number of ranks can compute again. It proves that the loaded state is
the saved one.

A save copies the state to host memory while training pauses. A thread then writes it. The folder
gets its final name when all its files are on the disk. Only then is the previous checkpoint
removed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from common import engines
from common.atomic_write import rename_complete, sync_path, write_whole
from common.benchmarks import rules_of
from common.errors import (
    DataError,
    Interrupted,
    RunError,
    StorageError,
    WeightsError,
    failure_of,
    first_line,
    listed,
)
from common.model.checkpoint_writer import write_file
from common.sharding.processes import Processes
from common.training.assembly import Assembly
from common.training.continuation import (
    BASE_FILES,
    CHECKPOINT,
    CHECKPOINTS_FOLDER,
    DATA_FILES,
    DEVICE,
    ENGINES,
    FACTS,
    PARTIAL_SUFFIX,
    SAVE,
    STOP_REQUEST,
    CheckpointInterval,
    base_record,
    changed_files,
    damaged,
    data_record,
    newest,
    parse_interval,
    require_possible,
    require_same,
    require_same_device,
)
from common.training.digest import fingerprint
from common.training.reports import Reports
from common.training.run import Run, frozen_weights_folder

# Timeout of a rank that waits for the slowest rank and disk.
WRITE_LIMIT = timedelta(hours=2)
# Key in the header of a file, for HuggingFaceStorageReader: the offset of each part in its tensor.
OFFSETS = "DCP_SHARDING_INFO"


@dataclass
class TensorPart:
    """The part of a tensor that this rank saves."""

    live: Tensor  # the tensor that training changes
    host: Tensor  # a copy in host memory
    state: Tensor  # `host` in the form that DCP expects: a DTensor if the tensor is sharded
    first: int  # index of the part's first element in the whole tensor

    @property
    def sharded(self) -> bool:
        """Whether the ranks hold different rows of the tensor."""
        return isinstance(self.state, DTensor)


class Checkpoints:
    """Checkpoints of a run: `load` before run_start, `offer` after a step, `finish` at the end.

    After each step and its evaluation, if `stop_requested`, `save_and_stop`.
    """

    def __init__(self, run: Run, reports: Reports, assembly: Assembly, processes: Processes):
        """Raise ConfigError for configs that do not support checkpoints."""
        require_possible(run.config)
        self.run = run
        self.reports = reports
        self.assembly = assembly
        self.processes = processes
        self.rank = processes.rank
        self.interval: CheckpointInterval | None = None
        if run.checkpoint:
            self.interval = parse_interval(run.checkpoint)
            _require_recorded_base(run)
        self.data: dict[str, list] | None = None  # result of `record_data`
        self.folder = run.run_dir / CHECKPOINTS_FOLDER
        # A separate group, because a save runs during training steps, and DCP's messages between
        # ranks need a CPU backend.
        self.group = dist.new_group(backend="gloo", timeout=WRITE_LIMIT)
        self.mesh = DeviceMesh.from_group(self.group, "cpu")
        # Another one for `stop_requested`, which must not wait for the GPU or for a save.
        self.stop_group = dist.new_group(backend="gloo")
        self.parts: dict[str, TensorPart] = {}
        for name, (live, rows) in self._tensors().items():
            self.parts[name] = self._part(live, rows)
        self.rank_state: dict[str, Tensor] = {}  # result of `_rank_state` at the last save, by name
        self.saving: Future | None = None  # the save in progress
        self.step = 0  # of the last offer, or of the loaded checkpoint
        self.saved_step = 0  # of the last save
        self.evaluations = 0
        self.last_save = time.monotonic()

    def identity(self) -> dict[str, Any]:
        """Return the facts that identify the run."""
        return {
            "benchmark": self.run.benchmark,
            "seed": self.run.seed,
            "config": asdict(self.run.config),
        }

    # Files that the run reads.

    def record_data(self) -> None:
        """Record the data files if the run saves checkpoints.

        Call it immediately before the run opens them. It reads them, so in a timed run that is
        after run_start. At the first save, other files could have their names.
        """
        if self.interval is not None:
            self.data = self._data_record()

    def require_recorded_data(self) -> None:
        """Raise DataError if data files changed since `record_data`, while the run opened them."""
        if self.data is None:
            return
        changed = changed_files(self.data, self._data_record())
        if changed:
            raise DataError(
                f"{listed(changed)} in {self.run.data_dir} changed while the run opened the data",
                "another program writes there, and a checkpoint must identify the data of its run",
                "wait until that program has finished, then start again",
            )

    def _data_record(self) -> dict[str, list]:
        rules = rules_of(self.run.benchmark, self.run.config)
        return data_record(self.run.data_dir, rules.recorded_files(self.run.data_dir))

    # State to save.

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        """Return name -> (this rank's rows, number of rows of the whole tensor).

        The number is 0 for a tensor that is not sharded.
        """
        model = self.assembly.model
        optimizer = self.assembly.optimizer
        names = {parameter: name for name, parameter in model.named_parameters()}
        tensors = {}
        per_weight = {"master": optimizer.weights}
        for kind, state in optimizer.rule.state().items():
            if isinstance(state, Tensor):
                tensors[f"optimizer.{kind}"] = (state.view(1) if state.ndim == 0 else state, 0)
            else:
                per_weight[kind] = state
        for number, parameter in enumerate(optimizer.parameters):
            for kind, parts in per_weight.items():
                part = parts[number].detach()
                rows = 0
                if optimizer.sharded:
                    rows = len(parameter)
                    # Without padding rows, which the last ranks may have.
                    part = part[: max(0, rows - self.rank * len(part))]
                tensors[f"{names[parameter]}.{kind}"] = (part, rows)
        return tensors

    def _part(self, live: Tensor, rows: int) -> TensorPart:
        """Allocate host memory for a tensor. Arguments as in the result of `_tensors`."""
        pinned = self.interval is not None and live.is_cuda
        host = torch.empty(live.shape, dtype=live.dtype, pin_memory=pinned)
        if not rows:
            return TensorPart(live, host, host, 0)
        size = torch.Size([rows, *live.shape[1:]])
        stride = torch.empty(size, device="meta").stride()
        state = DTensor.from_local(
            host, self.mesh, [Shard(0)], run_check=False, shape=size, stride=stride
        )
        rows_per_rank = -(-rows // self.processes.world_size)
        first_row = min(self.rank * rows_per_rank, rows)
        row_size = live.numel() // max(1, len(live))
        return TensorPart(live, host, state, first_row * row_size)

    def _rank_state(self) -> dict[str, Tensor]:
        """Return the state that each rank has for itself, as copies on the CPU.

        It consists of the random generators and the state of the linear layers.
        """
        state = {"cpu_generator": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            state["gpu_generator"] = torch.cuda.get_rng_state(self.processes.device)
        for name, tensor in self.assembly.linear.state().items():
            state[name] = tensor.to("cpu", copy=True)
        return state

    def _digest(self, rank_state: dict[str, Tensor], facts: dict[str, Any]) -> str:
        """Return a hash of `facts` and of all values on all ranks, for any number of ranks.

        `rank_state`: state that a rank has for itself, by its names in the checkpoint.
        """
        hashes = {}  # name -> (whether the tensor is sharded, hash of this rank's part)
        for name, part in self.parts.items():
            hashes[name] = (part.sharded, fingerprint(part.live.float(), part.first))
        for name, tensor in rank_state.items():
            hashes[name] = (False, fingerprint(tensor))
        hashes_of_ranks: list[Any] = [None] * self.processes.world_size
        dist.all_gather_object(hashes_of_ranks, hashes, group=self.group)
        total: dict[str, int] = {}
        for hashes_of_rank in hashes_of_ranks:
            for name, (sharded, value) in hashes_of_rank.items():
                # The hash of a whole tensor is the sum over its parts.
                before = total.get(name, 0) if sharded else 0
                total[name] = (before + value) % 2**64
        undigested = {key: value for key, value in facts.items() if key != "digest"}
        content = json.dumps([total, undigested], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    # Saving.

    def offer(self, step: int, evaluated: bool) -> None:
        """Save if a checkpoint is due. Call it between two steps, on all ranks at the same step.

        Raises StorageError if the previous save failed.
        """
        if self.saving is not None and self.saving.done():
            self.finish()
        self.step = step
        if self.interval is not None and self.due(self.interval, evaluated):
            self._save(step)

    def stop_requested(self) -> bool:
        """Return whether the launcher has made STOP_REQUEST. Call it on all ranks."""
        if self.interval is None:
            return False
        is_asked = self.rank == 0 and (self.run.run_dir / STOP_REQUEST).exists()
        asked = torch.tensor([float(is_asked)])
        dist.all_reduce(asked, group=self.stop_group)  # rank 0 decides for all ranks
        return bool(asked)

    def save_and_stop(self, step: int) -> NoReturn:
        """Save a checkpoint unless this step has one, wait for it, and raise Interrupted.

        Call it on all ranks at the same step, after its evaluation if it has one: a continued run
        begins with the next step. Raises StorageError if a save failed.
        """
        if step != self.saved_step:
            self.step = step
            self._save(step)
        self.finish()
        # If a rank ended now, torchrun would stop those that have not seen the save's end.
        dist.barrier(group=self.stop_group)
        raise Interrupted(signal.SIGTERM)

    def _save(self, step: int) -> None:
        """Begin to save, after the previous save has ended. Raises StorageError if that failed."""
        began = time.monotonic()
        self._write_heartbeat()
        self.finish()
        samples = step * self.run.config.global_batch_size
        assert self.data is not None, "record_data was not called"
        self.rank_state = {
            f"rank_{self.rank}.{name}": tensor for name, tensor in self._rank_state().items()
        }
        facts = self.identity() | {
            "step": step,
            "samples": samples,
            "ranks": self.processes.world_size,
            DATA_FILES: self.data,
            BASE_FILES: self.run.base_files,
            ENGINES: engines.used(),
            CHECKPOINT: self.run.checkpoint or "",
            SAVE: self.run.save,
        }
        writer = DcpWriter(self.folder / f"step_{step:08d}", facts)
        # Remove what a killed save of this step left, perhaps by more ranks. `_digest` exchanges
        # values, so the other ranks wait until this is done.
        if self.rank == 0:
            shutil.rmtree(writer.path, ignore_errors=True)
        facts[DEVICE] = self.processes.device.type
        facts["torch"] = torch.__version__
        facts["digest"] = self._digest(self.rank_state, facts)
        self.saving = dcp.async_save(
            {},
            storage_writer=writer,
            async_stager=DcpStager(self._copy_state),
            process_group=self.group,
        )  # type: ignore[assignment]
        self.saved_step = step
        self.last_save = time.monotonic()
        paused_s = self.last_save - began
        self.reports.events.write("checkpoint", step=step, samples=samples, seconds=paused_s)
        self.reports.progress.show(
            f"checkpoint of step {step}: training paused for {paused_s:.1f} s; writing continues"
        )

    def due(self, interval: CheckpointInterval, evaluated: bool) -> bool:
        """Return whether a checkpoint is due after this step."""
        if interval.evaluations:
            if not evaluated:
                return False
            self.evaluations += 1
            return self.evaluations % interval.evaluations == 0
        # The clock of rank 0 decides for all ranks.
        is_due = self.rank == 0 and time.monotonic() - self.last_save >= interval.seconds
        return bool(self.processes.sum(torch.tensor([float(is_due)], device=self.processes.device)))

    def _copy_state(self) -> dict[str, Tensor]:
        """Copy the state to host memory and return the copies by name."""
        for part in self.parts.values():
            part.host.copy_(part.live, non_blocking=True)
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: part.state for name, part in self.parts.items()} | self.rank_state

    def finish(self) -> None:
        """Wait for the save in progress.

        Raises StorageError if it failed. The previous checkpoint is then intact.
        """
        if self.saving is None:
            return
        self._write_heartbeat()
        while not self.saving.done():
            time.sleep(0.02)
            self._write_heartbeat()
        error = self.saving.exception()
        self.saving = None
        if error is not None:
            if self.rank == 0:
                for partial in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
                    shutil.rmtree(partial, ignore_errors=True)
            _raise_unsaved(error, self.folder)

    def _write_heartbeat(self) -> None:
        self.reports.heartbeat.write(self.step, "checkpoint")

    # Loading.

    def load(self) -> int:
        """Load the checkpoint of the run named by --continue, and return its number of steps.

        Call it once, since it frees the copies in host memory if the run saves no checkpoints.

        Returns 0 without --continue. Raises ConfigError if there is no checkpoint, or if it belongs
        to another run or device. Raises WeightsError if it is damaged.
        """
        if self.run.continues is None:
            return 0
        folder, facts = newest(self.run.continues)
        require_same(folder, facts, **self.identity() | {"config": self.run.config})
        require_same_device(folder, facts, self.processes.device.type)
        ranks = facts["ranks"]
        step = facts["step"]
        # Every rank loads the state that each saved rank had for itself.
        own_state = self._rank_state()
        state_of_ranks: list[dict[str, Tensor]] = []
        state_by_name: dict[str, Tensor] = {}
        for rank in range(ranks):
            state_of_ranks.append({})
            for name, tensor in own_state.items():
                loaded = torch.empty_like(tensor)
                state_of_ranks[rank][name] = loaded
                state_by_name[f"rank_{rank}.{name}"] = loaded
        state = {name: part.state for name, part in self.parts.items()} | state_by_name
        try:
            dcp.load(
                state,
                storage_reader=DcpReader(str(folder)),
                planner=DcpPlanner(self._write_heartbeat),
                process_group=self.group,
            )
        except CheckpointException as error:
            raise damaged(folder, _cause(error)) from None
        for part in self.parts.values():
            part.live.copy_(part.host)
        if self._digest(state_by_name, facts) != facts["digest"]:
            raise damaged(folder, f"its values, or those in {FACTS}, differ from the saved ones")
        counted = self.assembly.optimizer.rule.state().get("steps")
        if isinstance(counted, Tensor) and int(counted) != step:
            raise damaged(
                folder, f"{FACTS} says {step} steps, the optimizer has made {int(counted)}"
            )
        sharing = facts["config"].get("context_parallel", 1)
        self._restore_rank_state(state_of_ranks, sharing, step)
        self.assembly.optimizer.gather()
        self.step = step
        if self.interval is None:
            self.parts.clear()  # nothing will be saved: free the copies in host memory
        self.reports.progress.show(
            f"continuing {folder} after step {step}, {facts['samples']:,} samples"
        )
        return step

    def _restore_rank_state(
        self, state_of_ranks: list[dict[str, Tensor]], sharing: int, step: int
    ) -> None:
        """Restore the state that each rank has for itself.

        `state_of_ranks`: the `_rank_state` of each saved rank.
        `sharing`: number of saved ranks that shared each sequence.

        If the number of ranks has changed, or of those that share a sequence, scales follow from
        the largest values of all saved ranks, and the generators are seeded again: ranks that share
        a sequence draw the same numbers, and others do not.
        """
        linear = self.assembly.linear
        processes = self.processes
        same_ranks = len(state_of_ranks) == processes.world_size
        if not same_ranks or sharing != processes.context.size:
            linear.resume(state_of_ranks, step, processes.world_size / len(state_of_ranks))
            torch.manual_seed(hash((self.run.seed, step, processes.data_rank)) % 2**63)
            return
        own_state = state_of_ranks[self.rank]
        linear.resume([own_state], step)
        torch.set_rng_state(own_state["cpu_generator"])
        if self.processes.device.type == "cuda":
            torch.cuda.set_rng_state(own_state["gpu_generator"], self.processes.device)


def _require_recorded_base(run: Run) -> None:
    """Raise WeightsError if the frozen base changed since the run recorded it, before loading."""
    folder = frozen_weights_folder(run)
    changed = changed_files(run.base_files, base_record(folder))
    if changed:
        raise WeightsError(
            f"{listed(changed)} in {folder} changed while the run loaded the base",
            "another program writes there, and a checkpoint must identify the base of its run",
            "wait until that program has finished, then start again",
        )


def _causes(error: BaseException) -> list[BaseException]:
    """Return the exceptions of the ranks in a CheckpointException, or `error` itself."""
    if isinstance(error, CheckpointException):
        return [cause for cause, _ in error.failures.values()]
    return [error]


def _cause(error: BaseException) -> str:
    """Return the cause of `error` in one line. Raises it if it is a RunError, as after a signal."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, RunError):
            raise cause
    return first_line(causes[0])


def _raise_unsaved(error: BaseException, folder: Path) -> NoReturn:
    """Raise StorageError if a rank could not write its file, else `error` itself."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            raise StorageError(
                f"no checkpoint was saved in {folder}: {cause.strerror or cause}",
                "a writable disk must hold two checkpoints, "
                "because the previous one is kept until the new one is complete",
                "free space, or check the disk, then --continue this run; "
                "--checkpoint none saves nothing",
            ) from error
    raise error


class DcpStager(BlockingAsyncStager):
    """Source of DCP's copies in host memory, which it may write while training continues."""

    def __init__(self, copy_state: Callable[[], dict[str, Tensor]]):
        """`copy_state`: copies the state to host memory and returns the copies by name."""
        super().__init__()
        self.copy_state = copy_state

    def stage(self, state_dict: dict) -> dict:
        return self.copy_state()


class DcpWriter(dcp.HuggingFaceStorageWriter):
    """DCP's storage writer, which here writes a rank's tensors one after another to its own file.

    The `write_data` of DCP first builds one bytes object of the whole file. That is a second copy
    in host memory, and building it holds the GIL, so that no kernels can be launched.
    """

    def __init__(self, folder: Path, facts: dict):
        super().__init__(path=str(folder) + PARTIAL_SUFFIX, save_distributed=True)
        self.folder = folder
        self.facts = facts

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets = {}
        for item in plan.items:
            assert item.tensor_data is not None
            tensors[item.index.fqn] = planner.resolve_data(item)  # type: ignore[assignment]
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        shard = plan.storage_data["shard_index"]
        # Large dtypes first, so that each tensor is aligned to its dtype.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        write_file(
            Path(self.path) / f"rank_{shard - 1}.safetensors",
            tensors,
            metadata={OFFSETS: json.dumps(offsets)},
        )
        results = [
            WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items
        ]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint. Called on rank 0 when the files of all ranks are on the disk.

        It is saved when it has its name. The previous one is removed only if the disk has that name
        too. A failure in between leaves both.
        """
        partial = Path(self.path)
        write_whole(partial / FACTS, json.dumps(self.facts, indent=1).encode() + b"\n")
        sync_path(partial)
        rename_complete(partial, self.folder)
        with suppress(OSError):  # the next save tries again
            sync_path(self.folder.parent)
            for path in list(self.folder.parent.glob("step_*")):
                if path != self.folder:
                    _remove(path)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, or what is left of one. Raises OSError."""
    # Rename it first: a partly removed checkpoint must not have the name of a complete one.
    if checkpoint.suffix != PARTIAL_SUFFIX:
        checkpoint = checkpoint.rename(str(checkpoint) + PARTIAL_SUFFIX)
    shutil.rmtree(checkpoint, ignore_errors=True)


class DcpReader(dcp.HuggingFaceStorageReader):
    """A reader whose exceptions, unlike safetensors' own, can be pickled and sent to ranks."""

    def read_metadata(self) -> Metadata:
        with _sendable():
            return super().read_metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        with _sendable():
            return super().read_data(plan, planner)


@contextmanager
def _sendable() -> Iterator[None]:
    """Replace an exception in the block by a RunError, or another one that can be pickled."""
    try:
        yield
    except Exception as error:
        unknown = RuntimeError(f"{type(error).__name__}: {error}")
        raise failure_of(error) or unknown from None


class DcpPlanner(dcp.DefaultLoadPlanner):
    """A planner that calls `on_tensor` after each loaded tensor."""

    def __init__(self, on_tensor: Callable[[], None]):
        super().__init__()
        self.on_tensor = on_tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.on_tensor()
