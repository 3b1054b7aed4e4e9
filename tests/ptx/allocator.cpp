// Allocates torch's CPU tensors in the device's memory, so that every access of a kernel is checked.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <new>

extern "C" {
void* ptx_allocate(uint64_t bytes);
void ptx_free(void* memory);
}

namespace {

class OnDevice final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = bytes ? ptx_allocate(bytes) : nullptr;
    if (bytes && !memory) throw std::bad_alloc();
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* memory) {
    if (memory) ptx_free(memory);
  }
};

OnDevice on_device;

}  // namespace

extern "C" void ptx_take_over() { c10::SetCPUAllocator(&on_device, 1); }
