// Tuning constants of the engines: numbers that decide how fast an op is and change no bit of its results.
//
// These are compiled in, because compilers unroll loops and size arrays by them. The constants that Python passes at run
// time are fields of moe_rt.Tuning (moe_rt/config/tuning.py). Each constant has its unit and the reason for its value;
// docs/log.md has the measurements on CPUs. Values for GPUs follow from formulas (docs/cuda.md) unless an H200 is named.
#pragma once

#include "platform.h"

namespace moe_rt::tuning {

// --- GPU: rows ---

// Vectors of a row that a lane has in flight while it moves the row. 512 lanes with four of 16 bytes have 32 KiB in
// flight per block: the links are saturated if every multiprocessor has that.
inline constexpr int kVectorsAtOnce = 4;
// Pieces that a lane loads before it uses the first, in sums of rows: as many bytes in flight as registers permit.
inline constexpr int kPiecesAtOnce = 8;
// Rows that a lane loads together, in sums of raw rows and of coded rows, whose elements take more registers.
inline constexpr int kRowsTogether = 8, kCodedRowsTogether = 4;
// Vectors that a lane has in flight for dot products, the gradient's included.
inline constexpr int kVectorsOfDots = 4;
// Slots of a warp's ring, and groups of stores that may still read theirs: the others are being filled. 16 warps then
// have 144 KiB in flight per block, for rows of 7168 bf16.
inline constexpr int kRingSlots = 8, kRingStores = 2;

// --- GPU: routing, waits and whole ops ---

// Entries of topk_idx per lane in a routing tile: fewer tiles have fewer steps, and more entries exceed shared memory.
inline constexpr int kEntriesPerLane = 2;
// One block in this many routes, at most: routing a token takes far less time than moving its row.
inline constexpr int kBlocksPerRouter = 8;
// Lanes that check the counts of one source together. One lane would take longer for 256 counts than the rest of a
// dispatch of few tokens takes (H200).
inline constexpr int kLanesOfSource = 32;
// Maximum tokens of a rank in a buffer whose ops are whole: one launch of one block (gpu/whole_ops.h). By estimate one
// block is faster than two launches of many for that few tokens.
inline constexpr int32_t kWholeTokens = 2;
// Pause between two polls of a signal, in ns: short against a load from a peer, 1.5 to 2 us by estimate.
inline constexpr unsigned kDeviceNapNs = 32;
// Polls between two looks at poison, deadline and order of calls: these loads would delay each poll.
inline constexpr uint32_t kDeviceLookEvery = 16;

// --- two levels ---

// Route lists of at most this many bytes are fetched in one round trip: transferring them takes less than a second one.
inline constexpr int64_t kListsInOneTrip = 16 << 10;

// --- CPU: waits ---

// Polls of a signal before a rank yields its core, if cores suffice for all ranks and if not. 256 take about 5 us, which
// covers a peer that is already in the op; on 2 cores 256, 1,024 and 4,096 do not differ.
inline constexpr int kSpins = 256, kSpinsOversubscribed = 8;
// Pauses between two looks at the deadline, the order of calls and the peer, once a rank yields.
inline constexpr int kLookEvery = 64;
// A wait of this many ms dozes: it leaves the core to a peer that computes for long. A nap of 50 us costs little then.
inline constexpr int kDozeAfterMs = 5;
inline constexpr long kNapNs = 50'000;
// Time between two looks at the peer's process, which read a file, and between two at this process's signals.
inline constexpr int kLookAtProcessUs = 500, kLookForSignalsMs = 100;
// Time in ms between two looks of the thread that serves peers at the neighbours' announcements, which wake no thread: a
// look takes a few us of a core that may compute.
inline constexpr int kLookAtNeighboursMs = 1;
// Clients' tokens for which this thread adds up rows between two looks at the network: by estimate 0.1 ms for rows of 14
// KiB, while peers' requests wait.
inline constexpr int64_t kTokensAtOnce = 64;

// --- CPU: rows and caches ---

// Maximum time to read a line that a peer has just written if both share a cache, in ns. Measured: 10 to 20 with a
// shared cache, 100 and more without.
inline constexpr double kNearNs = 60;
// Maximum factor by which a peer's known latency rises per look: a line that was evicted to memory is slow as well.
inline constexpr double kLatencyRise = 1.5;
// Distance between a load and the line prefetched with it, in bytes. Measured on Zen 5 among none and 1, 2 and 4 KiB.
inline constexpr int64_t kPrefetchBytes = 2048, kPrefetchBytesAvx2 = 1024;
// Bytes of a row that are streamed to all its destinations before the next ones: each is read once, and no destination
// waits for a whole row of another.
inline constexpr int64_t kStreamedBytes = 1024;
// Blocks of a row that are summed together: enough independent additions to hide their latency, and whole lines.
inline constexpr int kBlocksTogether = 4;

// Rows are streamed past the caches when the rows that a rank writes in an op reach this share of its part of the
// last-level cache. They are published in a rank's own window, received from others' windows, pushed as partials into
// those, or combined from partials. Measured on Zen 3 with AVX2 and on a machine with AVX-512 (docs/log.md, Streaming
// past the caches); other tenants of a machine use the cache as well, so shares are below 1.
struct StreamShares {
  double published, received, pushed, combined;
};
inline constexpr StreamShares kStreamShares{0.8, 0.8, 0.1, 0.05}, kStreamSharesAvx2{0.8, 0.125, 0.1, 0.125};

// --- UCX ---

// Maximum bytes of one message; more data takes several. A message of this size takes one step of UCX over TCP: neither
// side has to assemble it.
inline constexpr int64_t kMessageBytes = 60 << 10;
// Maximum bytes in flight of a rank's gets from a peer, and of its puts there. Measured over TCP: both directions are
// busy together. A link that carries more than this in a round trip is not saturated by one pair of ranks.
inline constexpr int64_t kBytesInFlight = 192 << 10;
// Bytes of puts after which the receiver reports progress.
inline constexpr int64_t kReportAfter = kMessageBytes;
static_assert(kReportAfter + kMessageBytes <= kBytesInFlight,
              "or the next put may wait for a word that is not due yet");

}  // namespace moe_rt::tuning
