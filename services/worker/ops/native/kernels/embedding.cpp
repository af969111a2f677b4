// Looks up rows of a packed matrix: the embedding whose weight is also the head's.
#include <cmath>
#include <cstring>

#include "matrix.h"
#include "pool.h"
#include "recording.h"

namespace lockstep::products {

namespace {

constexpr float kMxfp4Values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

float read_half(const uint8_t* source) {
    uint16_t half = 0;
    std::memcpy(&half, source, 2);
    return _cvtsh_ss(half);
}

// The scale, or offset, of group `group` out of factors at `run`, of a float16 for each 256 columns.
float read_factored(const Matrix& m, int64_t place, int64_t group, const uint8_t* run) {
    const int64_t factor = group % (kFactoredColumns / m.group_size);
    return read_half(run + place * 2) * static_cast<float>(static_cast<int8_t>(run[kTileRows * (2 + factor) + place]));
}

float read_float(const uint8_t* source) {
    float value = 0.0f;
    std::memcpy(&value, source, 4);
    return value;
}

// The scale and the offset of a row in group `group`, whose header this is.
float read_scale(const Matrix& m, int64_t row, int64_t group, const uint8_t* header) {
    const int64_t place = row % kTileRows;
    switch (m.scales) {
        case Scales::kRow: return m.row_scales[row];
        case Scales::kPower: return std::ldexp(1.0f, header[place] - 127);
        case Scales::kFloat32: return read_float(header + place * 4);
        case Scales::kFloat16: return read_half(header + place * 2);
        case Scales::kFactors:
        case Scales::kFactors16: return read_factored(m, place, group, header);
    }
    return 0.0f;
}
float read_offset(const Matrix& m, int64_t row, int64_t group, const uint8_t* header) {
    const int64_t place = row % kTileRows;
    const uint8_t* offsets = header + scale_bytes(m.scales);
    switch (m.offsets) {
        case Offsets::kNone: return 0.0f;
        case Offsets::kRow: return m.row_offsets[row];
        case Offsets::kFloat32: return read_float(offsets + place * 4);
        case Offsets::kFloat16: return read_half(offsets + place * 2);
        case Offsets::kFactors: return read_factored(m, place, group, offsets);
    }
    return 0.0f;
}

int read_upper_bits(const Matrix& m, const uint8_t* codes, int64_t place, int64_t column) {
    const int64_t bits = m.kind == Kind::kInt5 ? 1 : 2, run = 2 / bits, step = column / kStep;
    const int64_t step_bytes = kStep * kTileRows / 2, run_bytes = run * step_bytes + 2 * kTileRows;
    const int64_t part = step % run * 4 + column / 4 % 2 * 2 + place / kLanes;
    const uint8_t* upper = codes + step / run * run_bytes + run * step_bytes;
    return upper[place % kLanes * 4 + column % 4] >> (part * bits) & ((1 << bits) - 1);
}

float read_value(const Matrix& m, const uint8_t* codes, int64_t place, int64_t column) {
    const int64_t step = column / kStep, half = column / 4 % 2, byte = place * 4 + column % 4;
    if (m.kind == Kind::kInt8) {
        const uint8_t code = codes[(2 * step + half) * kTileRows * 4 + byte];
        return static_cast<float>(static_cast<int8_t>(code - int8_zero(m)));
    }
    const bool has_upper = m.kind == Kind::kInt5 || m.kind == Kind::kInt6;
    // A run of steps is followed by their upper bits.
    const int64_t skipped = !has_upper ? 0 : (m.kind == Kind::kInt5 ? step / 2 : step) * 2 * kTileRows;
    const int low = codes[skipped + step * kTileRows * 4 + byte] >> (4 * half) & 15;
    switch (m.kind) {
        case Kind::kMxfp4: return kMxfp4Values[low];
        case Kind::kIq4: return kIq4Values[low];
        default: break;
    }
    const int upper = has_upper ? read_upper_bits(m, codes, place, column) : 0;
    return static_cast<float>((low | upper << 4) - static_cast<int>(m.zero));
}

// Dequantise the columns of group `group`, at `codes`, which share `scale` and `offset`.
void read_group(
    const Matrix& m, int64_t row, int64_t group, const uint8_t* codes, float scale, float offset, float* out) {
    const int64_t columns = group_columns(m.scales), first = group * columns;
    for (int64_t column = 0; column < columns && first + column < m.num_columns; ++column) {
        out[first + column] = read_value(m, codes, row % kTileRows, column) * scale + offset;
    }
}

void read_integers(const Matrix& m, int64_t row, float* out) {
    const int64_t tile = row / kTileRows, columns = group_columns(m.scales);
    const uint8_t *source = m.tiles + tile * tile_bytes(m), *header = nullptr;
    for (int64_t group = 0; group < num_groups(m); ++group) {
        if (group * columns % header_columns(m) == 0) {
            header = source;
            source += header_bytes(m);
        }
        const float scale = read_scale(m, row, group, header), offset = read_offset(m, row, group, header);
        read_group(m, row, group, source, scale, offset, out);
        source += packed_bytes(m.kind, columns);
    }
}

void read_row(const Matrix& m, int64_t row, float* out) {
    if (!is_float(m)) return read_integers(m, row, out);
    const uint8_t* tile = m.tiles + row / kTileRows * tile_bytes(m);
    const int64_t columns = m.kind == Kind::kFloat32 ? 1 : 2;
    for (int64_t column = 0; column < m.num_columns; ++column) {
        const uint8_t* source = tile + (column / columns * kTileRows + row % kTileRows) * 4;
        const uint32_t word = static_cast<uint32_t>(load_word(source));
        const uint32_t bits = columns == 1 ? word : column % 2 == 0 ? word << 16 : word & 0xFFFF0000u;
        std::memcpy(out + column, &bits, 4);
    }
}

template <class T>
void store_row(const float* values, int64_t count, T* out) {
    for (int64_t first = 0; first < count; first += kLanes) {
        const int part = static_cast<int>(count - first < kLanes ? count - first : kLanes);
        store_first(out + first, load_first(values + first, part), part);
    }
}

}  // namespace

struct RowsCall {
    const Matrix* m;
    const int64_t* ids;  // [count]
    int64_t count;
    void* out;  // [count, m.num_columns] in m.dtype, contiguous; written
};

namespace {

int64_t read_rows(const RowsCall& call) {
    const Matrix& m = *call.m;
    for (int64_t place = 0; place < call.count; ++place) {
        if (call.ids[place] < 0 || call.ids[place] >= m.num_rows) return place;
    }
    for_pieces(call.count, call.count > 4 ? num_threads() : 1, [&](int64_t place) {
        static thread_local Buffer buffer;
        auto* values = reinterpret_cast<float*>(buffer.reserve(m.num_columns * 4));
        read_row(m, call.ids[place], values);
        if (m.dtype == kFloat32) {
            store_row(values, m.num_columns, static_cast<float*>(call.out) + place * m.num_columns);
        } else {
            store_row(values, m.num_columns, static_cast<bf16*>(call.out) + place * m.num_columns);
        }
    });
    return call.count;
}

}  // namespace

struct TakeCall {
    const void* table;  // [num_rows] of `row_bytes`
    int64_t num_rows, row_bytes;
    const int64_t* ids;  // [count]
    int64_t count;
    void* out;  // [count] of `row_bytes`; written
};

namespace {

int64_t take_rows(const TakeCall& call) {
    for (int64_t place = 0; place < call.count; ++place) {
        const int64_t id = call.ids[place];
        if (id < 0 || id >= call.num_rows) return place;
        const auto* row = static_cast<const uint8_t*>(call.table) + id * call.row_bytes;
        std::memcpy(static_cast<uint8_t*>(call.out) + place * call.row_bytes, row, static_cast<size_t>(call.row_bytes));
    }
    return call.count;
}

}  // namespace

// Copies rows of a table. Returns `count`, or the place of the first id that is not a row.
LS_EXPORT int64_t ls_take_rows(const TakeCall* call) { return run_kernel<take_rows>(call); }

// Dequantises rows of `m`. Returns `count`, or the place of an id that is not a row, and nothing is written then.
LS_EXPORT int64_t ls_rows(const RowsCall* call) { return run_kernel<read_rows>(call); }

}  // namespace lockstep::products
