// Packs matrices into tiles.
#include <algorithm>

#include "matrix.h"
#include "pool.h"

namespace lockstep::products {

namespace {

// A matrix as it comes: rows one after the other, in the formats of `Matrix` in Python, scales apart.
struct Source {
    const Matrix& m;
    const uint8_t* values;
    const void* scales;  // [num_rows, num_scales]: float32, or bytes for Scales::kPower
};

// The codes of a row in the group of columns from `first` on, one in a byte; zeros in the padding.
void read_codes(const Source& source, int64_t row, int64_t first, uint8_t* codes) {
    const int64_t left = source.m.num_columns - first, count = std::min<int64_t>(left, group_columns(source.m.scales));
    std::memset(codes, 0, kMaxGroup);
    if (row >= source.m.num_rows) return;
    const int64_t index = row * source.m.num_columns + first;
    if (source.m.kind == Kind::kInt8) {
        for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(source.values[index + i] + kInt8Zero);
        return;
    }
    for (int64_t i = 0; i < count; i += 2) {
        const uint8_t pair = source.values[(index + i) / 2];
        codes[i] = pair & 15;
        codes[i + 1] = pair >> 4;
    }
}

void pack_codes(const Source& source, int64_t first_row, int64_t first_column, uint8_t* target) {
    const bool is_int8 = source.m.kind == Kind::kInt8;
    uint8_t codes[kMaxGroup];
    for (int64_t row = 0; row < kTileRows; ++row) {
        read_codes(source, first_row + row, first_column, codes);
        for (int64_t step = 0; step < group_columns(source.m.scales) / kStep; ++step) {
            const int32_t first = load_word(codes + step * kStep), second = load_word(codes + step * kStep + 4);
            if (is_int8) {
                std::memcpy(target + (2 * step * kTileRows + row) * 4, &first, 4);
                std::memcpy(target + ((2 * step + 1) * kTileRows + row) * 4, &second, 4);
            } else {
                const int32_t both = first | second << 4;
                std::memcpy(target + (step * kTileRows + row) * 4, &both, 4);
            }
        }
    }
}

void pack_scales(const Source& source, int64_t first_row, int64_t scale, uint8_t* target) {
    const Matrix& m = source.m;
    std::memset(target, 0, static_cast<size_t>(scale_bytes(m.scales)));
    for (int64_t row = 0; row < kTileRows && first_row + row < m.num_rows; ++row) {
        const int64_t index = (first_row + row) * num_scales(m) + scale;
        if (m.scales == Scales::kPower) {
            target[row] = static_cast<const uint8_t*>(source.scales)[index];
            continue;
        }
        const float value = static_cast<const float*>(source.scales)[index];
        const uint16_t half = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
        if (m.scales == Scales::kFloat32) std::memcpy(target + row * 4, &value, 4);
        if (m.scales == Scales::kFloat16) std::memcpy(target + row * 2, &half, 2);
    }
}

template <class T>
void pack_floats(const Source& source, int64_t first_row, uint8_t* target) {
    constexpr int64_t kColumns = 4 / sizeof(T);
    const Matrix& m = source.m;
    std::memset(target, 0, static_cast<size_t>(tile_bytes(m)));
    for (int64_t row = 0; row < kTileRows && first_row + row < m.num_rows; ++row) {
        const uint8_t* values = source.values + (first_row + row) * m.num_columns * sizeof(T);
        for (int64_t column = 0; column < m.num_columns; ++column) {
            uint8_t* place = target + (column / kColumns * kTileRows + row) * 4 + column % kColumns * sizeof(T);
            std::memcpy(place, values + column * sizeof(T), sizeof(T));
        }
    }
}

void pack_tile(const Source& source, int64_t tile) {
    const Matrix& m = source.m;
    const int64_t first_row = tile * kTileRows, bytes = code_bytes(m) / num_groups(m);
    uint8_t* target = m.tiles + tile * tile_bytes(m);
    if (m.kind == Kind::kFloat32) return pack_floats<float>(source, first_row, target);
    if (m.kind == Kind::kBfloat16) return pack_floats<bf16>(source, first_row, target);
    for (int64_t group = 0; group < num_groups(m); ++group) {
        const int64_t column = group * group_columns(m.scales);
        if (column % m.group_size == 0) {
            pack_scales(source, first_row, column / m.group_size, target);
            target += scale_bytes(m.scales);
        }
        pack_codes(source, first_row, column, target);
        target += bytes;
    }
}

}  // namespace

// The size of `m.tiles` in bytes; `m` may have no memory yet.
LS_EXPORT int64_t ls_tiles_bytes(const Matrix* m) { return num_tiles(*m) * tile_bytes(*m); }

// Write `m.tiles`, from values and scales in the formats of `Source`.
LS_EXPORT void ls_pack(const Matrix* m, const void* values, const void* scales) {
    const Source source{*m, static_cast<const uint8_t*>(values), scales};
    for_pieces(num_tiles(*m), num_threads(), [&](int64_t tile) { pack_tile(source, tile); });
}

}  // namespace lockstep::products
