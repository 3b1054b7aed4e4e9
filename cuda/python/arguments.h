// Python bindings of argument structs: each class has a constructor that takes every field by name, and only by name.
//
// The CPU engine reads such an object, and a CUDA launch copies the struct from its address. A field that a caller
// omits, or that does not exist, raises TypeError.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <type_traits>

namespace moe_rt {

using Address = uint64_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Python's representation of a field: an address for a pointer, an integer for an enumerator.
template <class T>
using Word = std::conditional_t<std::is_pointer_v<T>, Address, std::conditional_t<std::is_enum_v<T>, int32_t, T>>;

template <class T>
T from_word(Word<T> word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else {
    return static_cast<T>(word);
  }
}

template <class Args, class T>
struct Field {
  const char* name;
  T Args::* member;
};
template <class Args, class T>
Field(const char*, T Args::*) -> Field<Args, T>;

// `address` is the struct's address, valid for the object's lifetime.
template <class Args, class... Ts>
nanobind::class_<Args> bind_arguments(nanobind::module_& m, const char* name, Field<Args, Ts>... fields) {
  return nanobind::class_<Args>(m, name)
      .def(
          "__init__",
          [fields...](Args* self, Word<Ts>... words) {
            new (self) Args{};
            ((self->*fields.member = from_word<Ts>(words)), ...);
          },
          nanobind::kw_only(), nanobind::arg(fields.name)...)
      .def_prop_ro("address", [](const Args& args) { return reinterpret_cast<Address>(&args); });
}

// Binds a struct from the list that makes its fields.
#define MOE_RT_NAMED(type, name) \
  , Field { #name, &Self::name }
#define MOE_RT_BIND(module, Args, FIELDS)                            \
  [&] {                                                              \
    using Self = Args;                                               \
    return bind_arguments<Self>(module, #Args FIELDS(MOE_RT_NAMED)); \
  }()

}  // namespace moe_rt
