// Selection of an op's window, one of its kind's two, when the op starts: the other window if the previous op was of
// the same kind, else the same window again.
//
// In every op a rank receives a signal from all peers, each of which has by then finished the previous op. So an op of
// the other kind in between acknowledges all reads of a window, which may then be written again (docs/protocol.md). If
// kinds alternate, as in training, only one window of each is in use, and half as much memory goes through the caches.
#pragma once

#include "status.h"

namespace moe_rt {

#if defined(MOE_RT_WEAKENABLE)  // set by a test: the second of two ops of a kind then races with the first
inline bool selects_one_window = false;
#endif

// State of the selection, zero before the first op. All ranks issue the same ops in the same order, so their states
// agree.
struct WindowSelector {
  int32_t window[kNumKinds];  // 0 or 1: window of the last op of each kind
  int32_t last;               // 1 + kind of the last op

  MOE_RT_FN int next(Kind kind) const {
    const int k = static_cast<int>(kind);
#if defined(MOE_RT_WEAKENABLE)
    if (selects_one_window) return window[k];
#endif
    return last == k + 1 ? 1 - window[k] : window[k];
  }
  MOE_RT_FN int take(Kind kind) {
    const int k = static_cast<int>(kind);
    window[k] = next(kind);
    last = k + 1;
    return window[k];
  }
  MOE_RT_FN int taken(Kind kind) const { return window[static_cast<int>(kind)]; }
};

}  // namespace moe_rt
