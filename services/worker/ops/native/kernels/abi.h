// What all kernels share: the calling convention, and names for the types of tensors.
//
// Functions are plain C, take addresses, sizes in elements and strides in elements, and neither allocate what they return
// nor throw: callers have checked every size. They run on the threads of the caller's OpenMP runtime. A kernel with many
// arguments takes them as one structure of fields of 8 bytes, which Python packs.
#pragma once

#include <cstddef>
#include <cstdint>

#define LS_EXPORT extern "C" __attribute__((visibility("default")))

namespace lockstep {

// bfloat16: the high half of a float32.
struct bf16 {
    uint16_t bits;
};

}  // namespace lockstep
