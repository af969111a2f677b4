// Looks up rows of a packed matrix: the embedding whose weight is also the head's.
#include <cmath>
#include <cstring>

#include "matrix.h"
#include "pool.h"
#include "recording.h"

namespace lockstep::products {

namespace {

constexpr float kMxfp4Values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

float read_scale(const Matrix& m, int64_t row, const uint8_t* scales) {
    const int64_t place = row % kTileRows;
    float value = 0.0f;
    uint16_t half = 0;
    switch (m.scales) {
        case Scales::kRow: return m.row_scales[row];
        case Scales::kPower: return std::ldexp(1.0f, scales[place] - 127);
        case Scales::kFloat32: std::memcpy(&value, scales + place * 4, 4); return value;
        case Scales::kFloat16: std::memcpy(&half, scales + place * 2, 2); return _cvtsh_ss(half);
    }
    return value;
}

float read_value(const Matrix& m, const uint8_t* codes, int64_t place, int64_t column) {
    const int64_t step = column / kStep, half = column / 4 % 2;
    if (m.kind == Kind::kInt8) {
        const uint8_t code = codes[((2 * step + half) * kTileRows + place) * 4 + column % 4];
        return static_cast<float>(static_cast<int8_t>(code - kInt8Zero));
    }
    const int code = codes[(step * kTileRows + place) * 4 + column % 4] >> (4 * half) & 15;
    return m.kind == Kind::kInt4 ? static_cast<float>(code - 8) : kMxfp4Values[code];
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
    const int64_t tile = row / kTileRows, bytes = code_bytes(m) / num_groups(m);
    const uint8_t* source = m.tiles + tile * tile_bytes(m);
    float scale = 0.0f, offset = 0.0f;
    for (int64_t group = 0; group < num_groups(m); ++group) {
        const int64_t column = group * group_columns(m.scales), number = column / m.group_size;
        if (column % m.group_size == 0) {
            scale = read_scale(m, row, source);
            source += scale_bytes(m.scales);
            if (m.offsets) offset = m.offsets[(tile * num_scales(m) + number) * kTileRows + row % kTileRows];
        }
        read_group(m, row, group, source, scale, offset, out);
        source += bytes;
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
