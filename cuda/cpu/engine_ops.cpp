// The four ops of the CPU engine, each in two halves as on a GPU (gpu/ops.h): what it sends before it announces, and
// what it receives after all ranks have announced.
#include <algorithm>

#include "../protocol/two_level/reduce.h"
#include "exchange.h"
#include "local_partials.h"

namespace moe_rt {

namespace {

constexpr int64_t kNoFault = -1, kNeverStreamed = INT64_MAX;

}  // namespace

template <class Acc>
rows::HostRows<Acc> Engine::row_ops(int64_t n, int64_t stream_from, Codec codec) const {
  const Shape& s = world_.shape;
  return {table_,       &table_->functions<Acc>(config_.elem),      s.hidden,
          s.elem_bytes, n * s.hidden * s.elem_bytes >= stream_from, codec};
}

rows::HostScaledRows Engine::scaled_rows(const ScaledArgs& a, int64_t n, int64_t stream_from) const {
  return {table_,
          {a.code_bytes, a.scale_bytes},
          static_cast<const char*>(a.scales),
          static_cast<char*>(a.recv_scales),
          n * a.code_bytes >= stream_from};
}

// Steps of one dispatch, in the order in which they run: send (count, write_lists, publish); over a network fetch, once
// Engine::begin has announced, or what duty returns, in Engine::forward or between the halves; receive (index, take,
// judge_gathered). Every lane calls each step, except where one lane is named.
template <class Acc>
struct Engine::DispatchSteps {
  Engine& engine;
  const DispatchArgs& a;
  LaneCounters counters;
  Received<Acc> out;

  const World& w() const { return engine.world(); }

  static DispatchSteps make(Engine& engine, const DispatchArgs& a) {
    const World& w = engine.world_;
    return {engine,
            a,
            {engine.lane_counters_.data(), w.shape.num_experts, w.shape.num_ranks},
            {static_cast<char*>(a.recv_x), static_cast<Acc*>(a.recv_weights), a.capacity,
             RecvPlan::view(a.recv_plan, w.shape, w.num_local_experts())}};
  }

  // First half: writes this rank's lists and rows to its window.
  template <class Coop>
  void send(const Coop& coop, int window, Header& header) const {
    const auto lists = RouteLists<Acc>::view(w(), w().rank, window);
    count(coop, header, lists);
    if (header.status != Code::kOk) return;
    with_ids([&](const auto* ids) {
      write_lists(coop, engine.dims_, w(), ids, static_cast<const Acc*>(a.topk_weights), a.num_tokens, counters, lists,
                  a.send_plan);
    });
    const int64_t stream_from = engine.stream_from_.published;
    if (a.scaled.row_format) {
      publish(coop, window, engine.scaled_rows(a.scaled, a.num_tokens, stream_from));
    } else {
      publish(coop, window, engine.row_ops<Acc>(a.num_tokens, stream_from, engine.dims_.codec(Op::kDispatch)));
    }
  }

  // Counts each lane's visits and turns the counts into the lane's places in the lists, or refuses the op because of a
  // bad expert id.
  template <class Coop>
  void count(const Coop& coop, Header& header, const RouteLists<Acc>& lists) const {
    int64_t bad = kNoFault;
    const bool valid = with_ids([&](const auto* ids) {
      return count_visits(coop, engine.dims_, w(), ids, a.num_tokens, counters, a.send_plan, &bad);
    });
    engine.lane_fault_[coop.rank()] = valid ? kNoFault : bad;
    coop.sync();
    if (coop.rank() == 0) {
      for (const int64_t fault : engine.lane_fault_) {
        if (fault == kNoFault || header.status != Code::kOk) continue;
        header.refuse(Code::kInvalidRouting, fault, w().shape.num_experts);
      }
      if (header.status == Code::kOk) place_lanes(w(), counters, coop.size(), lists);
    }
    coop.sync();
  }

  // Calls fn with a pointer to the ids: their width is tested once, not for each id.
  template <class Fn>
  auto with_ids(Fn&& fn) const {
    return a.idx_bytes == 4 ? fn(static_cast<const int32_t*>(a.topk_idx)) : fn(static_cast<const int64_t*>(a.topk_idx));
  }

  template <class Coop, class Rows>
  void publish(const Coop& coop, int window, const Rows& rows) const {
    publish_rows(coop, w(), window, static_cast<const char*>(a.x), a.num_tokens, rows);
  }

  static constexpr bool kWide = sizeof(Acc) > sizeof(float);
  // One lane runs it: starts to fetch the rows of unmapped peers.
  void fetch(int window, const Header& header) const {
    engine.running_->remote_peers->begin(
        w(), {.window = window, .header = header, .row_bytes = encoded_row_bytes(), .wide = kWide});
  }
  Duty duty(int window) const {
    return {.window = window,
            .forwards = out.plan.forwards,
            .row_bytes = encoded_row_bytes(),
            .lists = true,
            .wide = kWide};
  }
  int64_t encoded_row_bytes() const {
    if (a.scaled.code_bytes) return RowParts{a.scaled.code_bytes, a.scaled.scale_bytes}.bytes();
    return engine.row_ops<Acc>(0, 0, engine.dims_.codec(Op::kDispatch)).encoded_row_bytes();
  }

  // Second half: indexes the lists of all peers and gathers their rows.
  template <class Coop>
  void receive(const Coop& coop, const Pending& op, Status& status) const {
    const int window = op.window;
    Blocks blocks = Blocks::view(engine.blocks_.data(), w().shape, w().num_local_experts());
    if (!index(coop, op.header.seq, window, blocks, status)) return;
    write_index(coop, w(), op.number, a.num_tokens, a.capacity, a.expert_rows, blocks, a.offs, out.plan);
    const int64_t num_rows = blocks.part_end(w(), w().num_parts() - 1), stream_from = engine.stream_from_.received;
    if (a.scaled.code_bytes) {
      take(coop, window, blocks, engine.scaled_rows(a.scaled, num_rows, stream_from));
    } else {
      take(coop, window, blocks, engine.row_ops<Acc>(num_rows, stream_from, engine.dims_.codec(Op::kDispatch)));
    }
    coop.sync();
    if (coop.rank() == 0) judge_gathered(blocks, status);
  }

  // False, on every lane, if a peer's lists are corrupt or some rank has no space for its rows; lane 0 sets the status.
  template <class Coop>
  bool index(const Coop& coop, uint64_t seq, int window, Blocks& blocks, Status& status) const {
    const int corrupt_source = index_blocks<Acc>(coop, w(), window, a.expert_rows, blocks);
    if (corrupt_source >= 0) {
      if (coop.rank() == 0) status = corrupt(corrupt_source);
      return false;
    }
    const int full = engine.config_.drop_overflow ? -1 : overflowing_rank(coop, w(), seq, window, blocks);
    if (full < 0) return true;
    if (coop.rank() != 0) return false;
    const auto& starts = w().shape.by_token() ? blocks.pull_start : blocks.copy_start;
    engine.needed_rows_ = round_up(starts[w().shape.num_ranks] + w().most_padding(w().rank), w().shape.alignment);
    status = {.code = Code::kCapacityOverflow,
              .phase = Phase::kGather,
              .peer = full,
              .got = rows_for(w(), window, blocks, full),
              .expected = room_for_rows(w(), seq, full)};
    return false;
  }

  template <class Coop, class Rows>
  void take(const Coop& coop, int window, const Blocks& blocks, const Rows& rows) const {
    engine.with_link(window, [&](const auto& link) {
      engine.lane_fault_[coop.rank()] = gather(coop, engine.dims_, w(), window, blocks, out, rows, link);
    });
    clear_padding(coop, w(), blocks.ends, a.capacity, out.recv_x, out.recv_weights, rows);
  }

  // Reports the last peer that gather found corrupt, or the first whose entries share copies.
  void judge_gathered(const Blocks& blocks, Status& status) const {
    int64_t peer = *std::max_element(engine.lane_fault_.begin(), engine.lane_fault_.end());
    if (peer < 0) peer = unshared_copies(w(), blocks, out.plan);
    if (peer >= 0) status = corrupt(int32_t(peer));
  }
  static Status corrupt(int32_t peer) { return {.code = Code::kCorruptPeer, .phase = Phase::kGather, .peer = peer}; }
};

template <class Acc>
Status Engine::typed_dispatch(const DispatchArgs& a, uint32_t tag, Half half) {
  const auto steps = DispatchSteps<Acc>::make(*this, a);
  const auto middle = between([&](int window, const Header& header) { steps.fetch(window, header); },
                              [&](int window) { return steps.duty(window); });
  return run(
      &a, call_of(a, tag), half,
      [&](const auto& coop, int window, Header& header) { steps.send(coop, window, header); },
      [&](const auto& coop, const Pending& op, Status& status) { steps.receive(coop, op, status); }, {}, middle);
}

// Checks that an op may follow its plans, and that its rows are complete. It runs before anything is announced, so that
// every rank learns of a refusal in this op. The plans that it reads stay in the cache for the op.
template <class Args>
Status Engine::judge(Op op, const RecvPlan& plan, const int32_t* send_plan, const Args& a) const {
  Status status{.op = op, .phase = Phase::kPublish, .peer = world_.rank};
  if (!plan.head || !plan.fits(world_, a.num_tokens, a.capacity) || !plan.leads_inside(world_) ||
      (send_plan && !send_plan_leads_inside(send_plan, a.num_tokens, world_.shape))) {
    status.code = Code::kInvalidInput;
  } else if (a.num_rows < plan.head->num_rows) {
    status.code = Code::kInvalidInput, status.got = a.num_rows, status.expected = plan.head->num_rows;
  }
  return status;
}

// True if `out` shares memory with the inputs of local partials: these must then be computed before any of `out` is
// written.
bool Engine::out_overlaps_rows(const CombineArgs& a) const {
  const int64_t row_bytes = int64_t{world_.shape.hidden} * world_.shape.elem_bytes;
  const auto overlaps = [&](const void* memory, int64_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(memory), out = reinterpret_cast<uintptr_t>(a.out);
    return memory && at < out + a.num_tokens * row_bytes && out < at + bytes;
  };
  return overlaps(a.y, a.num_rows * row_bytes) || overlaps(a.recv_weights, a.capacity * world_.shape.acc_bytes);
}

template <class Acc>
Status Engine::typed_combine(const CombineArgs& a, uint32_t tag, Half half) {
  RecvPlan plan = RecvPlan::view(a.recv_plan, world_.shape, world_.num_local_experts());
  const Status judged = judge(a.op, plan, a.send_plan, a);
  if (half == Half::kFirst && !judged.ok()) return judged;
  if (half == Half::kBoth && !judged.ok()) return refuse(judged.op, judged.code, judged.got, judged.expected, tag);
  plan.judged = true;
  const Codec codec = dims_.codec(a.op);
  const Returned<Acc> in{plan, static_cast<const char*>(a.y), static_cast<const Acc*>(a.recv_weights),
                         static_cast<const Acc*>(a.grad_recv_weights)};
  using Own = LocalPartials<RuntimeDims, Acc, rows::HostRows<Acc>>;
  if (dims_.sums() == Sums::kInvariant) return combine_entries(a, in, tag, half);
  const bool all_pushed = out_overlaps_rows(a);
  const auto send = [&](const auto& coop, int window, Header&) {
    const auto rows = row_ops<Acc>(plan.head->num_pulled - plan.head->num_own, stream_from_.pushed, codec);
    with_link(window, [&](const auto& link) {
      if (all_pushed) {
        push<LocalPushed>(coop, dims_, world(), window, in, rows, link);
      } else {
        push<Own>(coop, dims_, world(), window, in, rows, link);
      }
    });
  };
  const auto cached = row_ops<Acc>(1, kNeverStreamed, codec);
  const auto receive = [&](const auto& coop, const Pending& op, Status&) {
    const int window = op.window;
    const auto reduce_with = [&](auto own) {
      const auto rows = row_ops<Acc>(a.num_tokens, stream_from_.combined, codec);
      auto* const out = static_cast<char*>(a.out);
      auto* const grads = static_cast<Acc*>(a.grad_topk_weights);
      if (running_->proxy) {
        reduce_nodes(coop, dims_, world(), window, a.send_plan, a.num_tokens, out, grads, rows, cached,
                     scratch_row(coop.rank(), 1), own);
      } else {
        reduce(coop, dims_, world(), window, a.send_plan, a.num_tokens, out, grads, rows, own);
      }
    };
    if (all_pushed) {
      reduce_with(LocalPushed{});
    } else {
      reduce_with(Own{world(), window, in, cached, scratch_row(coop.rank())});
    }
  };
  const auto duty_of = [&](int window) {
    const bool scalars = a.grad_recv_weights != nullptr;
    const auto send_sums = [=, proxy = running_->proxy](const Part& part, const int32_t* forwards, char* sum) {
      proxy->send_sums(part, window, forwards, cached, scalars, sum);
    };
    return Duty{.window = window, .forwards = plan.forwards, .send = send_sums};
  };
  return run(&a, call_of(a, tag, plan), half, send, receive, {}, between(kNothing, duty_of));
}

// The op with Sums::kInvariant, after its plans were judged.
template <class Acc>
Status Engine::combine_entries(const CombineArgs& a, const Returned<Acc>& in, uint32_t tag, Half half) {
  const RecvPlan& plan = in.plan;
  const RecvPlan::Head& head = *plan.head;
  const Codec codec = dims_.codec(a.op);
  using Own = LocalEntries<Acc>;
  // The caller may write y once the first half has returned, if the source applies the weights.
  const bool all_pushed = codec != Codec::kRaw || out_overlaps_rows(a) || (a.topk_weights && half != Half::kBoth);
  const int64_t others = head.num_pulled - head.num_own;
  const auto send = [&](const auto& coop, int window, Header&) {
    // An estimate, which only decides whether stores are streamed.
    const int64_t num_rows = head.num_pulled ? head.num_copies * others / head.num_pulled : 0;
    const auto rows = row_ops<Acc>(num_rows, stream_from_.pushed, codec);
    with_link(window, [&](const auto& link) {
      if (all_pushed) {
        push_entries<LocalPushed>(coop, world(), window, in, rows, link);
      } else {
        push_entries<Own>(coop, world(), window, in, rows, link);
      }
    });
  };
  const auto receive = [&](const auto& coop, const Pending& op, Status&) {
    const int window = op.window;
    const auto rows = row_ops<Acc>(a.num_tokens, stream_from_.combined, codec);
    const auto reduce_with = [&](auto own) {
      reduce_entries(coop, dims_, world(), window, a.send_plan, a.num_tokens, static_cast<char*>(a.out),
                     static_cast<const Acc*>(a.topk_weights), static_cast<Acc*>(a.grad_topk_weights), rows, own);
    };
    if (all_pushed) {
      reduce_with(LocalPushed{});
    } else {
      reduce_with(Own{world(), window, in, rows.tensor_row_bytes()});
    }
  };
  const int64_t bytes = entry_bytes<Acc>(row_ops<Acc>(0, 0, codec).encoded_row_bytes());
  const auto duty_of = [&](int window) {
    const auto send_home = [=, proxy = running_->proxy](const Part& part, const int32_t* forwards, char*) {
      proxy->send_entries(part, window, forwards, bytes);
    };
    return Duty{.window = window, .forwards = plan.forwards, .send = send_home};
  };
  return run(&a, call_of(a, tag, plan), half, send, receive, {}, between(kNothing, duty_of));
}

template <class Acc>
Status Engine::typed_combine_backward(const CombineBackwardArgs& a, uint32_t tag, Half half) {
  RecvPlan plan = RecvPlan::view(a.recv_plan, world_.shape, world_.num_local_experts());
  const Status judged = judge(Op::kCombineBackward, plan, nullptr, a);
  if (half == Half::kFirst && !judged.ok()) return judged;
  if (half == Half::kBoth && !judged.ok()) return refuse(judged.op, judged.code, judged.got, judged.expected, tag);
  plan.judged = true;
  const Codec codec = dims_.codec(Op::kCombineBackward);
  const auto send = [&](const auto& coop, int window, Header&) {
    publish_rows(coop, world(), window, static_cast<const char*>(a.grad_out), a.num_tokens,
                 row_ops<Acc>(a.num_tokens, stream_from_.published, codec));
  };
  const auto receive = [&](const auto& coop, const Pending& op, Status&) {
    const int window = op.window;
    const auto rows = row_ops<Acc>(plan.head->num_rows, stream_from_.received, codec);
    auto* const grad_y = static_cast<char*>(a.grad_y);
    auto* const grad_recv_weights = static_cast<Acc*>(a.grad_recv_weights);
    with_link(window, [&](const auto& link) {
      gather_grad<RuntimeDims>(coop, world(), window, plan, static_cast<const char*>(a.y),
                               static_cast<const Acc*>(a.recv_weights), grad_y, grad_recv_weights, rows, link);
    });
    clear_padding(coop, world(), plan.ends, plan.head->num_rows, grad_y, grad_recv_weights, rows);
  };
  const int64_t row_bytes = row_ops<Acc>(0, 0, codec).encoded_row_bytes();
  const auto middle = between(
      [&](int window, const Header& header) {
        running_->remote_peers->begin(world(),
                                      {.window = window, .header = header, .row_bytes = row_bytes, .plan = plan});
      },
      [&](int window) { return Duty{.window = window, .forwards = plan.forwards, .row_bytes = row_bytes}; });
  return run(&a, call_of(a, tag, plan), half, send, receive, {}, middle);
}

template Status Engine::typed_dispatch<float>(const DispatchArgs&, uint32_t, Half);
template Status Engine::typed_dispatch<double>(const DispatchArgs&, uint32_t, Half);
template Status Engine::typed_combine<float>(const CombineArgs&, uint32_t, Half);
template Status Engine::typed_combine<double>(const CombineArgs&, uint32_t, Half);
template Status Engine::typed_combine_backward<float>(const CombineBackwardArgs&, uint32_t, Half);
template Status Engine::typed_combine_backward<double>(const CombineBackwardArgs&, uint32_t, Half);

}  // namespace moe_rt
