"""DeepEP's tuning config. It tunes nothing on CPU ranks; its sizes decide which buffers DeepEP would refuse."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rt.errors import expect

NVL_PEERS = 8  # ranks that DeepEP connects by NVLink
_MAX_TOPK = _MAX_SCALES = 128
_META_BYTES = 8


@dataclass
class Config:
    """Number of SMs and of tokens in DeepEP's queues.

    Raises:
        InvalidConfig: DeepEP would refuse these numbers.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        expect(self.num_sms >= 0, "num_sms", self.num_sms, "at least 0")
        send, recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        expect(0 < send < recv, "num_max_nvl_chunked_send_tokens", send, f"1 to {recv - 1}, below the received ones")
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        expect(send > 0, "num_max_rdma_chunked_send_tokens", send, "at least 1")
        self.num_max_rdma_chunked_recv_tokens = -(-recv // send) * send
        half = self.num_max_rdma_chunked_recv_tokens // 2
        expect(send <= half, "num_max_rdma_chunked_send_tokens", send, f"at most {half}, half of the received ones")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of NVLink memory that DeepEP's queues need."""
        nodes, peers = max(num_ranks // NVL_PEERS, 1), min(num_ranks, NVL_PEERS)
        token = hidden_bytes + _META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        queue = (2 * nodes + 3) * 4 + self.num_max_nvl_chunked_recv_tokens * token
        return _round_up(self.num_sms // 2 * peers * queue, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of RDMA memory that DeepEP's queues need: none for up to 8 ranks."""
        if num_ranks <= NVL_PEERS:
            return 0
        expect(num_ranks % NVL_PEERS == 0, "num_ranks", num_ranks, f"a multiple of {NVL_PEERS}")
        token = hidden_bytes + _META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4 + 16
        queue = (2 * NVL_PEERS + 2) * 4 + self.num_max_rdma_chunked_recv_tokens * token
        return _round_up(2 * (self.num_sms // 2) * (num_ranks // NVL_PEERS) * queue, 128)

    def nvl_bytes(self, num_ranks: int, row_bytes: int, num_topk: int, num_scales: int) -> int:
        """Return the bytes of NVLink memory that DeepEP requires in a dispatch of such rows."""
        channels = self.num_sms // 2 * num_ranks
        token = row_bytes + 4 + num_topk * (8 + 4) + num_scales * 4
        return 4 * num_ranks**2 + channels * (16 + self.num_max_nvl_chunked_recv_tokens * token)


def low_latency_bytes(num_max_tokens: int, hidden: int, num_experts: int) -> int:
    """Return the bytes of RDMA memory that DeepEP requires for low-latency ops: two of each of its buffers."""
    scales = hidden // 128
    sent = 16 + max(2 * hidden, hidden + 4 * scales)
    returned = 4 * scales + 2 * hidden
    send_buffer = max(num_max_tokens * sent, num_experts * num_max_tokens * returned)
    receive_buffer = num_experts * num_max_tokens * max(sent, returned)
    return 2 * (send_buffer + receive_buffer + _round_up(4 * num_experts, 128))


def low_latency_hint(num_max_tokens: int, hidden: int, num_experts: int) -> int:
    """Return low_latency_bytes, rounded up beyond the next multiple of 128."""
    return (low_latency_bytes(num_max_tokens, hidden, num_experts) // 128 + 1) * 128


def queue_of(table: dict[int, tuple[int, int, int, int]], num_ranks: int, num_sms: int) -> Config:
    """Return the config of the largest number of ranks in the table that is at most num_ranks."""
    return Config(num_sms, *table[max((size for size in table if size <= num_ranks), default=2)])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
