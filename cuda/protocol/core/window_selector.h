// Which of its kind's two windows an op takes: the other one after an op of the same kind, else the same again.
//
// In every op a rank hears from all peers, each of which has by then finished the op before. So an op of the other
// kind in between acknowledges all reads of a window, which may then be written again (docs/protocol.md). Where kinds
// alternate, as in training, a single window of each is in use, and half as much memory goes through the caches.
#pragma once

#include "status.h"

namespace moe_rt {

#if defined(MOE_RT_WEAKENABLE)  // a test sets it: the second of two ops of a kind races with the first then
inline bool selects_one_window = false;
#endif

// Zero before the first op. All ranks issue the same ops in the same order, and so agree.
struct WindowSelector {
  int32_t window[kNumKinds];  // 0 or 1, of the last op of either kind
  int32_t last;               // the kind of the last op of all plus one

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
