// Steps shared by every op of the engine: exclusive use, announcement, waits, header checks, and permanent failure.
#include "engine.h"

#include <algorithm>
#include <stdexcept>

#include "../protocol/two_level/link.h"
#include "exchange.h"
#include "recording.h"
#include "world_tables.h"

namespace moe_rt {

namespace {

// Background work of every channel's network steps.
struct AllChannels : Background {
  std::vector<std::shared_ptr<RemoteNetwork>> each;
  int go_on() override {
    int in_ms = kNever;
    for (const auto& channel : each) in_ms = std::min(in_ms, channel->go_on());
    return in_ms;
  }
};

int num_remote(const EngineConfig& c) { return static_cast<int>(std::count(c.segments.begin(), c.segments.end(), 0u)); }

}  // namespace

Engine::Engine(EngineConfig config)
    : config_(std::move(config)),
      dims_{config_.shape.hidden, config_.shape.num_topk, config_.dispatch_codec, config_.combine_codec,
            config_.shape.sums},
      table_(rows::find_table(config_.isa.c_str())),
      nodes_(config_.node_of, config_.rank),
      channels_(config_.shape.depth),
      world_(channels_.front().world),
      num_mapped_(config_.shape.num_ranks - num_remote(config_)),
      cache_locality_(config_.shape.num_ranks, num_remote(config_), config_.rank, config_.near_ns) {
  if (!table_) throw std::invalid_argument("this machine or build has no row primitives for isa=" + config_.isa);
  const Shape& shape = config_.shape;
  if (shape.num_topk < 1 || shape.num_topk > kMaxTopk) {
    throw std::invalid_argument("num_topk outside [1, " + std::to_string(kMaxTopk) + "]");
  }
  const int num_ranks = shape.num_ranks;
  placement_ = PlacementTables::make(config_.expert_rank, num_ranks);
  for (const uint64_t segment : config_.segments) base_.push_back(reinterpret_cast<char*>(segment));

  const uint64_t plan_mark = new_plan_mark();
  for (size_t c = 0; c < channels_.size(); ++c) {
    channels_[c].world = {.shape = shape,
                          .layout = Layout::of_channel(shape, int64_t(c)),
                          .placement = placement_.view(),
                          .base = base_.data(),
                          .mirror = nullptr,
                          .rank = config_.rank,
                          .config = config_.config_hash,
                          .plan_mark = plan_mark};
    std::fill_n(channels_[c].seq, kNumKinds, config_.first_seq - 1);
    if (num_mapped_ < num_ranks) reach_remote(channels_[c]);
  }
  if (num_mapped_ < num_ranks) {
    auto all = std::make_shared<AllChannels>();
    for (const Channel& channel : channels_) all->each.push_back(channel.remote);
    config_.network->keep(std::move(all), world_.base[world_.rank]);
  }
  const int lanes = config_.num_lanes;
  lane_counters_.resize(LaneCounters::num_ints(shape, lanes));
  blocks_.resize(Blocks::num_ints(shape, world_.num_local_experts()));
  lane_fault_.resize(lanes);
  scratch_rows_.resize(lanes * kScratchRows * shape.row_bytes() / kRowAlign);
  arrival_ns_.resize(num_ranks);
  waited_ns_.resize(num_ranks);
  last_[0] = last_[1] = config_.first_seq - 1;
  if (lanes > 1) team_ = std::make_unique<Team>(lanes);
  pid_ = getpid();
  set_stream_from();
  oversubscribed_ = num_mapped_ * lanes > config_.num_cores;
}

Engine::~Engine() {
  close();
  if (pid_ != getpid()) static_cast<void>(team_.release());  // its threads exist in the parent only
  if (pid_ == getpid()) stop_remote();                       // a close while another thread was inside an op did not
}

void Engine::reach_remote(Channel& channel) {
  if (!config_.network) throw std::invalid_argument("unmapped segments require a network");
  World& w = channel.world;
  if (config_.node_of.empty()) {
    auto remote = std::make_shared<RemotePeers>(config_.shape, w.layout, base_, *config_.network);
    channel.remote_peers = remote.get(), channel.remote = std::move(remote);
    w.mirror = channel.remote_peers->mirrors();
  } else {
    w.nodes = nodes_.view();
    auto remote = std::make_shared<Proxy>(w, nodes_, *config_.network);
    channel.proxy = remote.get(), channel.remote = std::move(remote);
    w.mirror = channel.proxy->lists();
  }
}

// Forgets the ops under way, whose tensors the caller may free.
void Engine::stop_remote() {
  for (const Channel& channel : channels_) {
    if (channel.remote) channel.remote->stop();
  }
}

// Number of the last op of this kind that a peer has announced here, in any channel.
uint64_t Engine::num_announced(Kind kind, int peer) const {
  uint64_t num = config_.first_seq - 1;
  for (const Channel& channel : channels_) {
    num += load_acquire(channel.world.mailbox(world_.rank, kind, peer).signal) - (config_.first_seq - 1);
  }
  return num;
}

// Announces the op to all peers. Fails if a fault is injected.
Status Engine::post_all(Pending& op) {
  const Header& header = op.header;
  const int num_ranks = world_.shape.num_ranks;
  const Status injected{.code = Code::kFaultInjected};
  for (int i = 0; i < num_ranks; ++i) {
    const int peer = (world_.rank + i) % num_ranks;
    if (i == num_ranks - 1 && op.fault_point == Point::kAfterSomeFlags && !config_.fault.strike()) return injected;
    if (world_.base[peer]) post(world().mailbox(peer, kind_of(op_of(header)), world_.rank), header);
  }
  if (RemoteNetwork* const remote = running_->remote.get()) {
    config_.network->begin_driving();
    std::vector<RemoteNetwork::Posting> postings;
    if (running_->proxy) {
      postings = running_->proxy->own_postings(header, world_.rank);
    } else {
      for (const int peer : remote->ranks()) postings.push_back({peer, world_.rank, header});
    }
    remote->announce(world(), postings);
  }
  return op.fault_point == Point::kAfterAllFlags && !config_.fault.strike() ? injected : Status{};
}

// Waits for all peers, or only for the peers that announce before proxies pass anything on.
Status Engine::wait_for(Pending& op, bool direct_only) {
  const Header& ours = op.header;
  const Kind kind = kind_of(op.call.op);
  const auto start = Clock::now();
  op.idle.resume(start);
  int64_t before = 0;
  for (int peer = 0; peer < world_.shape.num_ranks; ++peer) {
    if (direct_only && !announces_directly(world_, kind, peer)) continue;
    const Mailbox& mailbox = world().mailbox(world_.rank, kind, peer);
    const int announcer = announcer_of(world_, kind, peer);
    op.idle.watch({.peer = peer,
                   .announcer = announcer,
                   .process = config_.watches.empty() ? -1 : config_.watches[announcer],
                   .passed_on = !announces_directly(world_, kind, peer),
                   .in_order = announces_itself(world_, peer)});
    const Code code = wait_signal(mailbox, ours.seq, op.idle);
    const int64_t arrival = nanoseconds(start, Clock::now()), waited = arrival - before;
    before = arrival;
    store_relaxed(waited_ns_[peer], waited_ns_[peer] + waited);
    if (waited > op_record_.longest_ns) op_record_.longest_ns = waited, op_record_.longest_peer = peer;
    if (code == Code::kInterrupted) return {.code = code, .phase = Phase::kWait};  // no peer is to blame
    const uint64_t announced = load_acquire(mailbox.signal);
    // An error that idle found is void if the peer has announced meanwhile, unless this rank is poisoned.
    if (code != Code::kOk && (code == Code::kPoisoned || !reached(announced, ours.seq))) {
      // The announcer is late: it has neither passed the announcement on nor reported that it waits for the peer
      // itself.
      return {.code = code,
              .phase = Phase::kWait,
              .peer = announcer,
              .got = int64_t(num_announced(kind, peer)),
              .expected = int64_t(op.number)};
    }
    arrival_ns_[peer] = arrival;
  }
  return {};
}

// Waits for every peer, including peers that send nothing, before it checks any header: the order of peers must not
// decide which of two refusals is raised, and buffer reuse needs all signals.
Status Engine::wait_all(Pending& op) {
  const Status waited = wait_for(op, false);
  return waited.ok() ? judge_headers(op.header) : waited;
}

// Returns the worst status of all peers.
Status Engine::judge_headers(const Header& ours) const {
  const Kind kind = kind_of(op_of(ours));
  Status worst;
  for (int peer = 0; peer < world_.shape.num_ranks; ++peer) {
    const Status s = check_header(world().mailbox(world_.rank, kind, peer).header[ours.seq & 1], ours, peer);
    if (s.code > worst.code) worst = s;
  }
  return worst;
}

HostIdle Engine::idle(Op op, uint64_t number) const {
  return {world(),
          op,
          number,
          running_->seq,
          config_.timeout_s,
          oversubscribed_,
          config_.interrupted,
          running_->remote ? config_.network.get() : nullptr};
}

// Ranks that share a cache have equal parts of it. Rows for a rank with another cache are always streamed: that rank
// reads them faster from memory than from this cache.
void Engine::set_stream_from() {
  const auto part = static_cast<double>(config_.cache_bytes) / cache_locality_.num_near();
  const auto from = [&](double share) { return static_cast<int64_t>(part * share); };
  const tuning::StreamShares& shares = config_.stream_shares ? *config_.stream_shares : table_->stream;
  stream_from_ = {from(shares.published), from(shares.received), from(shares.pushed), from(shares.combined)};
  if (cache_locality_.num_near() < num_mapped_) stream_from_.published = stream_from_.pushed = 0;
}

Status Engine::fail(Status status) {
  if (status.ok() || is_refusal(status.code)) return status;
  // A rank that aborted may look dead or closed if its exit is seen before its poison word, which names the cause.
  if (status.code == Code::kPoisoned || status.code == Code::kPeerDead || status.code == Code::kPeerClosed) {
    const uint64_t word = load_acquire(world_.poison(world_.rank));  // pairs with poison: last words come before it
    if (word != 0) status = poisoned(word, status);
  }
  stop_remote();
  // Failures that other ranks found are passed on as well: their authors may have died before they reached every rank.
  poison(status.code, status.peer);
  return failure_ = status;
}

// Writes the running op's record to this rank's own segment, where peers and other processes read it (op_record.h).
void Engine::record(int64_t OpRecord::* step, Clock::time_point when) {
  op_record_.*step = nanoseconds({}, when);
  write_op_record(world_.op_record(op_record_.number), op_record_);
}

std::vector<int64_t> Engine::waited_ns() const {
  std::vector<int64_t> waited;
  for (const int64_t& ns : waited_ns_) waited.push_back(load_relaxed(ns));
  return waited;
}

void Engine::leave_words(std::string_view text) {
  if (pid_ == getpid()) write_last_words(*world_.at<LastWords>(world_.rank, world_.layout.last_words), text);
}

// Writes the own segment's word first: if a peer's failure is already there, that word is passed on. Otherwise: 1. a
// peer fails and poisons this rank, 2. this rank fails because of it and poisons a third rank, 3. the third rank takes
// this rank for the cause. Acquire and release: a rank that sees a word, passed on or not, also sees the last words of
// the rank that it names.
void Engine::poison(Code code, int peer) {
  if (pid_ != getpid()) return;
  uint64_t& own = world_.poison(world_.rank);
  replace_acq_rel(own, uint64_t{0}, poison_word(code, world_.rank, peer));
  const uint64_t first = load_acquire(own);
  for (int r = 0; r < world_.shape.num_ranks; ++r) {
    if (world_.base[r]) replace_acq_rel(world_.poison(r), uint64_t{0}, first);
  }
  if (channels_[0].remote) channels_[0].remote->poison(world_, first);
}

Status Engine::health() const {
  if (pid_ != getpid()) return {.code = Code::kForked};
  if (load_acquire(closed_)) return {.code = Code::kClosed};
  if (!failure_.ok()) return failure_;
  const uint64_t word = load_acquire(world_.poison(world_.rank));  // see fail
  return word == 0 ? Status{} : poisoned(word);
}

bool Engine::close() {
  if (pid_ != getpid() || exchange_acquire(closed_, 1u)) return false;
  // Takes the engine permanently: a later op finds it busy and closed, and touches no segment. Nothing is passed on once
  // peers know that this rank has closed.
  const bool taken = exchange_acquire(busy_, 1u) == 0;
  if (taken) stop_remote();
  for (int peer = 0; peer < world_.shape.num_ranks; ++peer) {
    if (!world_.base[peer]) continue;
    for (const Channel& channel : channels_) {
      for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
        post_closed(channel.world.mailbox(peer, kind, world_.rank));
      }
    }
  }
  if (channels_[0].remote) {
    std::vector<uint64_t> last_seqs;
    for (const Channel& channel : channels_) last_seqs.insert(last_seqs.end(), channel.seq, channel.seq + kNumKinds);
    config_.network->leave(last_seqs);
  }
  return taken;
}

Status Engine::refuse(Op op, Code code, int64_t got, int64_t expected, uint32_t tag) {
  const auto nothing = [](const auto&, auto&&...) {};
  const Status refusal{.code = code, .phase = Phase::kPublish, .peer = world_.rank, .got = got, .expected = expected};
  return run(nullptr, {.op = op, .tag = tag}, Half::kBoth, nothing, nothing, refusal);
}

Status Engine::dispatch(const DispatchArgs& args, uint32_t tag, Half half) {
  return config_.elem == rows::Elem::kFloat64 ? typed_dispatch<double>(args, tag, half)
                                              : typed_dispatch<float>(args, tag, half);
}

Status Engine::combine(const CombineArgs& args, uint32_t tag, Half half) {
  return config_.elem == rows::Elem::kFloat64 ? typed_combine<double>(args, tag, half)
                                              : typed_combine<float>(args, tag, half);
}

Status Engine::combine_backward(const CombineBackwardArgs& args, uint32_t tag, Half half) {
  return config_.elem == rows::Elem::kFloat64 ? typed_combine_backward<double>(args, tag, half)
                                              : typed_combine_backward<float>(args, tag, half);
}

}  // namespace moe_rt
