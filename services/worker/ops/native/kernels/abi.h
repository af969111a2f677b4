// What all kernels share: the calling convention, and names for the types of tensors.
//
// Functions are plain C, take addresses, sizes in elements and strides in elements, and neither allocate what they return
// nor throw: callers have checked every size. They run on the threads of `pool.h`. A kernel takes its arguments as one
// structure of fields of 8 bytes, which Python packs (`struct`) and passes as bytes: that costs 0.4 microseconds, where
// ctypes needs 0.2 for each argument on its own.
#pragma once

#include <cstddef>
#include <cstdint>

#define LS_EXPORT extern "C" __attribute__((visibility("default")))

namespace lockstep {

// bfloat16: the high half of a float32.
struct bf16 {
    uint16_t bits;
};

// How a tensor's elements are stored. Python's side of it is `ops/native/formats.py`.
enum Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

}  // namespace lockstep
