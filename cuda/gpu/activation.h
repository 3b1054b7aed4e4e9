// SwiGLU over the real rows of a receive buffer, and its backward. The number of real rows is read on the device.
//
// The functions run on the machines of ops.h. Rows past the last expert's end are neither read nor written. Arithmetic
// is in the accumulator type and every result is rounded once.
#pragma once

#include "../protocol/core/args.h"
#include "elements.h"

namespace moe_rt {

// gate_up [num_rows, 2 * intermediate] holds the gate in its first columns; out is [num_rows, intermediate].
template <class Elem, int kElems>
struct alignas(sizeof(Elem) * kElems) ElemVector {
  Elem elem[kElems];
};

MOE_RT_FN float exponential(float x) { return expf(x); }
MOE_RT_FN double exponential(double x) { return exp(x); }

// Number of real rows, never more than the tensors have, whatever offs contains.
template <class Args>
MOE_RT_FN int64_t num_real_rows(const Args& a) {
  return min_of(int64_t{a.offs[a.num_local - 1]}, a.num_rows);
}

// True if rows of row_bytes bytes start at multiples of 16 in each of the tensors.
template <class... Pointers>
MOE_RT_FN bool on_vectors(int64_t row_bytes, Pointers... tensors) {
  return (uint64_t(row_bytes) | ... | reinterpret_cast<uint64_t>(tensors)) % 16 == 0;
}

// Calls fn(row, at) for each of the `each` vectors of every row, with neighbouring vectors on neighbouring lanes. It
// advances row and vector by addition: a 64-bit division per vector would take longer than the activation.
template <class Machine, class Fn>
MOE_RT_FN void for_vectors(const Machine& m, int64_t num_rows, int64_t each, Fn&& fn) {
  const auto block = m.block();
  const int64_t first = int64_t{m.block_index()} * block.size() + block.rank();
  const int64_t step = int64_t{m.num_blocks()} * block.size();
  const int64_t step_rows = step / each, step_at = step % each;
  int64_t row = first / each, at = first % each;
  while (row < num_rows) {
    fn(row, at);
    row += step_rows;
    at += step_at;
    if (at >= each) {
      at -= each;
      ++row;
    }
  }
}

template <class Elem, int kElems, class Machine>
MOE_RT_FN void swiglu_vectors(const Machine& m, const SwigluArgs& a) {
  using Acc = typename Elem::Acc;
  using Vector = ElemVector<Elem, kElems>;
  const int64_t each = a.intermediate / kElems;
  const Vector* const gate_up = static_cast<const Vector*>(a.gate_up);
  Vector* const out = static_cast<Vector*>(a.out);
  for_vectors(m, num_real_rows(a), each, [&](int64_t row, int64_t at) {
    const Vector gate = gate_up[row * 2 * each + at], up = gate_up[(row * 2 + 1) * each + at];
    Vector result;
    for (int e = 0; e < kElems; ++e) {
      const Acc g = gate.elem[e].wide();
      result.elem[e] = Elem::round(g / (1 + exponential(-g)) * up.elem[e].wide());
    }
    out[row * each + at] = result;
  });
}

template <class Elem, int kElems, class Machine>
MOE_RT_FN void swiglu_backward_vectors(const Machine& m, const SwigluBackwardArgs& a) {
  using Acc = typename Elem::Acc;
  using Vector = ElemVector<Elem, kElems>;
  const int64_t each = a.intermediate / kElems;
  const Vector* const grad = static_cast<const Vector*>(a.grad);
  const Vector* const gate_up = static_cast<const Vector*>(a.gate_up);
  Vector* const out = static_cast<Vector*>(a.grad_gate_up);
  for_vectors(m, num_real_rows(a), each, [&](int64_t row, int64_t at) {
    const int64_t gate_at = row * 2 * each + at, up_at = gate_at + each;
    const Vector d = grad[row * each + at], gate = gate_up[gate_at], up = gate_up[up_at];
    Vector grad_gate, grad_up;
    for (int e = 0; e < kElems; ++e) {
      const Acc dy = d.elem[e].wide(), g = gate.elem[e].wide(), s = 1 / (1 + exponential(-g));
      grad_gate.elem[e] = Elem::round(dy * up.elem[e].wide() * s * (1 + g * (1 - s)));
      grad_up.elem[e] = Elem::round(dy * g * s);
    }
    out[gate_at] = grad_gate;
    out[up_at] = grad_up;
  });
}

template <class Elem, class Machine>
MOE_RT_FN void swiglu_forward(const Machine& m, const SwigluArgs& a) {
  if (on_vectors(a.intermediate * int64_t{sizeof(Elem)}, a.gate_up, a.out)) {
    swiglu_vectors<Elem, 16 / int(sizeof(Elem))>(m, a);
  } else {
    swiglu_vectors<Elem, 1>(m, a);
  }
}

template <class Elem, class Machine>
MOE_RT_FN void swiglu_backward(const Machine& m, const SwigluBackwardArgs& a) {
  if (on_vectors(a.intermediate * int64_t{sizeof(Elem)}, a.grad, a.gate_up, a.grad_gate_up)) {
    swiglu_backward_vectors<Elem, 16 / int(sizeof(Elem))>(m, a);
  } else {
    swiglu_backward_vectors<Elem, 1>(m, a);
  }
}

}  // namespace moe_rt
