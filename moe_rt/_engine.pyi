"""Types of the compiled CPU engine (cuda/host/bindings.cpp). Addresses are tensor.data_ptr()."""

MAX_TOPK: int
NEAR_NS: float
TAG_BITS: int
PLAN_CAPACITY: int
PLAN_NUM_DROPPED: int
MAX_SCRATCH_BYTES: int
HOST_RECORD_BYTES: int
NUM_OP_RECORDS: int
MOST_LAST_WORDS: int

class Shape:
    def __init__(
        self, *, num_ranks: int, num_experts: int, num_max_tokens: int, hidden: int, num_topk: int, elem_bytes: int
    ) -> None: ...
    def segment_bytes(self) -> int: ...
    def recv_plan_ints(self, num_local: int, /) -> int: ...

class Status:
    code: int
    op: int
    phase: int
    peer: int
    seq: int
    got: int
    expected: int

class Fault:
    at: int
    def __init__(self, *, at: int, action: int, op: int, seconds: float) -> None: ...
    def strike(self) -> bool: ...

class Engine:
    def __init__(
        self,
        *,
        shape: Shape,
        elem: int,
        rank: int,
        config_hash: int,
        expert_rank: list[int],
        capacity: list[int],
        segments: list[int],
        watches: list[int],
        timeout_s: float,
        dispatch_codec: int,
        combine_codec: int,
        drop_overflow: bool,
        num_lanes: int,
        isa: str,
        fault: Fault,
        cache_bytes: int,
        near_ns: float,
        num_cores: int,
    ) -> None: ...
    def dispatch(
        self,
        x: int,
        topk_idx: int,
        topk_weights: int,
        num_tokens: int,
        recv_x: int,
        recv_weights: int,
        offs: int,
        recv_plan: int,
        send_plan: int,
        tag: int,
        /,
    ) -> Status: ...
    def combine(
        self,
        op: int,
        y: int,
        recv_weights: int,
        grad_recv_weights: int,
        recv_plan: int,
        send_plan: int,
        num_tokens: int,
        out: int,
        grad_topk_weights: int,
        tag: int,
        /,
    ) -> Status: ...
    def combine_backward(
        self,
        grad_out: int,
        num_tokens: int,
        y: int,
        recv_weights: int,
        recv_plan: int,
        grad_y: int,
        grad_recv_weights: int,
        tag: int,
        /,
    ) -> Status: ...
    def refuse(self, op: int, code: int, got: int, expected: int, tag: int, /) -> Status: ...
    def needed_rows(self) -> list[int]: ...
    def set_capacity(self, capacity: list[int], /) -> None: ...
    def leave_words(self, text: bytes, /) -> None: ...
    def poison(self, code: int, peer: int, /) -> None: ...
    def health(self) -> Status: ...
    def timings(self) -> tuple[int, int, int, int, list[int], list[float]]: ...
    def waited_ns(self) -> list[int]: ...
    def stream_from(self) -> tuple[int, int, int, int]: ...
    def close(self) -> bool: ...

class SegmentHeader:
    rank: int
    num_ranks: int
    num_experts: int
    num_max_tokens: int
    hidden: int
    num_topk: int
    elem_bytes: int
    config: int
    poison: int
    mailboxes: int
    members: int
    op_records: int
    last_words: int

class OpRecord:
    number: int
    seq: int
    op: int
    code: int
    tag: int
    num_tokens: int
    start_ns: int
    announced_ns: int
    heard_ns: int
    end_ns: int
    longest_ns: int
    longest_peer: int
    handle_seq: int

class SegmentReport:
    header: SegmentHeader
    poison: tuple[int, int, int]
    announced: tuple[list[int], list[int]]
    closed_to: list[bool]
    members: list[tuple[int, int]]
    op_records: list[OpRecord]
    num_torn: int
    last_words: bytes

def has_ended(descriptor: int, /) -> bool: ...
def read_segment(holder: object, /) -> SegmentReport: ...
def write_segment_header(
    *, segment: int, shape: Shape, rank: int, config_hash: int, members: list[tuple[int, int]]
) -> None: ...
def weighted_sum(
    isa: str, elem: int, dst: int, srcs: list[int], weights: list[float], hidden: int, stream: bool, /
) -> None: ...
def isas() -> list[str]: ...
def placement_tables(expert_rank: list[int], num_ranks: int, /) -> tuple[list[int], list[int], list[int]]: ...
def world(
    *,
    shape: Shape,
    rank: int,
    config_hash: int,
    position: int,
    owner: int,
    rank_first: int,
    capacity: int,
    base: int,
    mirror: int,
) -> bytes: ...
def scratch_bytes(shape: Shape, expert_rank: list[int], rank: int, threads: int, /) -> int: ...
def network_layout(shape: Shape, num_warps: int, /) -> tuple[int, int, int, int, int]: ...
def device_state() -> bytes: ...
def reported(record: int, /) -> Status | None: ...
