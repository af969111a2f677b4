// The tile unit (AMX): eight registers of up to 16 rows of 64 bytes, and products of two of them added to a third.
//
// Written as assembly with the memory that it touches, since gcc's intrinsics lack that up to version 14. A thread
// configures its tiles before it uses them and releases them after, so that the system need not save them.
#pragma once

#ifdef USE_AMX

#include <cstdint>

namespace lockstep::amx {

constexpr int kRows = 16;
constexpr int64_t kRowBytes = 64;

// The shapes of the eight tiles, as `ldtilecfg` reads them.
struct alignas(64) Shapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t num_rows, int64_t num_bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    }
};

// Tiles with these shapes, all of them zero, while this object lives.
class Tiles {
public:
    explicit Tiles(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int kTile>
void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// `stride` is in bytes, from row to row.
template <int kTile>
void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// kSum += kLeft [rows, depth] @ kRight [depth / 4, columns, 4], of signed bytes into int32.
template <int kSum, int kLeft, int kRight>
void dot_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}
// kSum += kLeft [rows, depth] @ kRight [depth / 2, columns, 2], of bfloat16 into float32. Subnormal numbers count as 0.
template <int kSum, int kLeft, int kRight>
void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

}  // namespace lockstep::amx

#endif
