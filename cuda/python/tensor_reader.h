// Validation of an op's tensors in one call: each must have the right size and type, and plain contiguous memory.
//
// torch gives access through the function table that it exports to other libraries, DLPack's exchange API, so this
// module is neither built with torch nor linked with it. Reading attribute by attribute takes Python longer than
// exchanging a token. Python checks tensors that are not plain again (moe_rt/engine/checks.py): it reports the error,
// or makes a plain copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <tuple>

#include "../cpu/rows.h"
#include "../protocol/core/plan.h"

namespace moe_rt {

namespace nb = nanobind;

// DLPackExchangeAPI of dlpack.h 1.3; a version with another layout has another `major`.
struct DlpackExchange {
  uint32_t major, minor;
  void *older, *allocate, *share, *adopt;
  int (*read)(PyObject* tensor, nb::dlpack::dltensor* found);  // returns no ownership; -1 with an exception on failure
  void* stream;
};

class TensorReader {
 public:
  using Found = nb::dlpack::dltensor;
  using Dtype = nb::dlpack::dtype;

  // Reader for a rank whose tensors are on `device`, and whose inputs begin at multiples of `vector_bytes`; `tensor` is
  // torch.Tensor.
  TensorReader(nb::handle tensor, const Shape& shape, rows::Elem elem, int64_t plan_ints, nb::dlpack::device device,
               int64_t vector_bytes)
      : is_neg_(tensor.attr("is_neg")),
        is_zero_(tensor.attr("_is_zerotensor")),
        shape_(shape),
        rows_(dtype_of(elem)),
        weights_{kFloat, uint8_t(8 * shape.acc_bytes), 1},
        plan_ints_(plan_ints),
        device_(device),
        vector_bytes_(vector_bytes) {
    const nb::object table = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(table.ptr(), kTable)) return;  // this torch has no such table: no tensor is plain
    const auto* found = static_cast<const DlpackExchange*>(PyCapsule_GetPointer(table.ptr(), kTable));
    if (found->major == kMajor) read_ = found->read;
  }

  // Treats tensors in this memory as not plain from now on: ops write it, and Python decides which tensors may be
  // there.
  void avoid(uintptr_t begin, uintptr_t end) { avoided_begin_ = begin, avoided_end_ = end; }

  // Returns T of x [T, H], topk_idx [T, K] and topk_weights [T, K], or -1 if one of them is not plain.
  int64_t dispatch(nb::handle x, nb::handle topk_idx, nb::handle topk_weights) const {
    Found rows, ids, weights;
    const bool plain = input(x, rows) && input(topk_idx, ids) && input(topk_weights, weights) &&
                       is_matrix(rows, rows_, shape_.hidden) &&
                       (is_matrix(ids, {kInt, 64, 1}, shape_.num_topk) || is_matrix(ids, kInt32, shape_.num_topk)) &&
                       is_matrix(weights, weights_, shape_.num_topk) && ids.shape[0] == rows.shape[0] &&
                       weights.shape[0] == rows.shape[0];
    return plain ? rows.shape[0] : -1;
  }

  // Returns N, capacity and T of y [N, H], recv_weights [capacity], or [capacity, K] with RecvLayout::kTokens, or None,
  // and a handle's plans. None if one of them is not plain. Rows of experts without weights, which the source applies,
  // may be [L, N / L, H] as well.
  std::optional<std::tuple<int64_t, int64_t, int64_t>> combine(nb::handle y, nb::handle recv_weights,
                                                               nb::handle recv_plan, nb::handle send_plan) const {
    Found rows, weights, sent;
    if (!input(y, rows) || !is_plan(recv_plan) || !lies_here(send_plan, sent) ||
        !is_matrix(sent, kInt32, shape_.num_topk)) {
      return std::nullopt;
    }
    const bool padded = recv_weights.is_none() && !shape_.by_token() && rows.ndim == 3;
    if (rows.dtype != rows_ || rows.ndim != 2 + padded || rows.shape[1 + padded] != shape_.hidden) return std::nullopt;
    const int64_t num_rows = padded ? rows.shape[0] * rows.shape[1] : rows.shape[0];
    if (recv_weights.is_none()) return {{num_rows, kAnyCapacity, sent.shape[0]}};
    if (!input(recv_weights, weights)) return std::nullopt;
    const bool fits = shape_.by_token() ? is_matrix(weights, weights_, shape_.num_topk)
                                        : weights.dtype == weights_ && weights.ndim == 1;
    if (!fits || rows.shape[0] > weights.shape[0]) return std::nullopt;
    return {{rows.shape[0], weights.shape[0], sent.shape[0]}};
  }

  // Returns whether grad_out [T, H], y [N, H], recv_weights [capacity] and a recv_plan are plain, and not kTokens.
  bool combine_backward(nb::handle grad_out, nb::handle y, nb::handle recv_weights, nb::handle recv_plan) const {
    Found grads, rows, weights;
    return !shape_.by_token() && input(grad_out, grads) && is_matrix(grads, rows_, shape_.hidden) && input(y, rows) &&
           is_matrix(rows, rows_, shape_.hidden) && input(recv_weights, weights) && weights.dtype == weights_ &&
           weights.ndim == 1 && rows.shape[0] <= weights.shape[0] && is_plan(recv_plan);
  }

 private:
  static constexpr const char* kTable = "dlpack_exchange_api";
  static constexpr uint32_t kMajor = 1;
  static constexpr auto kInt = uint8_t(nb::dlpack::dtype_code::Int), kFloat = uint8_t(nb::dlpack::dtype_code::Float);
  static constexpr Dtype kInt32{kInt, 32, 1};

  static Dtype dtype_of(rows::Elem elem) {
    switch (elem) {
      case rows::Elem::kBfloat16:
        return {uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
      case rows::Elem::kFloat16:
        return {kFloat, 16, 1};
      case rows::Elem::kFloat64:
        return {kFloat, 64, 1};
      default:
        return {kFloat, 32, 1};
    }
  }

  static bool is_matrix(const Found& t, Dtype dtype, int64_t columns) {
    return t.ndim == 2 && t.shape[1] == columns && t.dtype == dtype;
  }

  bool is_plan(nb::handle tensor) const {
    Found t;
    return lies_here(tensor, t) && t.dtype == kInt32 && t.ndim == 1 && t.shape[0] == plan_ints_;
  }

  // True if the tensor is dense, on this device, contiguous and outside the avoided memory; strides of dimensions with
  // one entry have no meaning.
  bool lies_here(nb::handle tensor, Found& t) const {
    if (!read_) return false;
    if (read_(tensor.ptr(), &t) != 0) {
      PyErr_Clear();
      return false;
    }
    if (t.device.device_type != device_.device_type || t.device.device_id != device_.device_id) return false;
    int64_t size = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      if (t.shape[i] != 1 && t.strides[i] != size) return false;
      size *= t.shape[i];
    }
    const auto at = reinterpret_cast<uintptr_t>(t.data);
    return at >= avoided_end_ || at + size * t.dtype.bits / 8 <= avoided_begin_;
  }

  // True if the memory also holds what torch shows: no pending negation, and no zero tensor without data.
  bool input(nb::handle tensor, Found& t) const {
    if (!lies_here(tensor, t) || reinterpret_cast<uintptr_t>(t.data) % vector_bytes_ != 0) return false;
    return is_false(is_zero_, tensor) && (t.dtype.code == kInt || is_false(is_neg_, tensor));
  }

  static bool is_false(const nb::object& method, nb::handle tensor) {
    PyObject* const self = tensor.ptr();
    PyObject* const answer = PyObject_Vectorcall(method.ptr(), &self, 1, nullptr);
    if (!answer) PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_False;
  }

  nb::object is_neg_, is_zero_;
  Shape shape_;
  Dtype rows_, weights_;
  int64_t plan_ints_;
  nb::dlpack::device device_;
  int64_t vector_bytes_;
  uintptr_t avoided_begin_ = 0, avoided_end_ = 0;
  int (*read_)(PyObject*, Found*) = nullptr;
};

}  // namespace moe_rt
