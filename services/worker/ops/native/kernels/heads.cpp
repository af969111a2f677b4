// What lies between a layer's fused projection and its attention: norms of heads, their rotation, the write to the cache.
#include <algorithm>
#include <cmath>

#include "cache.h"
#include "pool.h"
#include "recording.h"
#include "simd.h"

namespace lockstep {
namespace {

// Elements from which a second thread saves more than it costs to wake it.
constexpr int64_t kWorthThreads = 64 * 1024;

struct HeadsArgs {
    // Normalised and rotated in place: [num_tokens, num_heads, head_dim].
    void* query;
    int64_t query_stride, query_head_stride, num_heads;
    // Written to the cache, the key normalised and rotated: [num_tokens, num_kv_heads, head_dim or value_dim]. Heads
    // lie side by side.
    const void* key;
    int64_t key_stride;
    const void* value;
    int64_t value_stride, num_kv_heads;
    int64_t num_tokens, head_dim, value_dim;
    int64_t format;
    // [head_dim] each, in `format` or float32; null: not normalised.
    const void* query_norm;
    const void* key_norm;
    double eps;
    int64_t norm_format;
    // [positions, num_pairs]; null: not rotated.
    const float* cosines;
    const float* sines;
    const int64_t* positions;
    int64_t num_pairs, is_interleaved;
    const int64_t* slots;
    void* key_cache;
    void* value_cache;
    float* key_scales;
    float* value_scales;
    int64_t cache_format;
};

struct RowsArgs {
    const void* values;
    void* cache;
    const int64_t* slots;
    int64_t num_tokens, token_stride;
    // Bytes, and a stride in bytes.
    int64_t row_bytes;
};

// One head in float32, and what is done with it.
struct Head {
    // Whole vectors.
    float* values;
    int64_t dim;

    template <typename T>
    void read(const T* from) {
        for_vectors(dim, [&](int64_t i, int64_t count) { store(values + i, load_up_to(from + i, count)); });
    }

    template <typename T>
    void write(T* to) const {
        for_vectors(dim, [&](int64_t i, int64_t count) { store_up_to(to + i, load(values + i), count); });
    }

    template <typename T>
    void normalise(const T* weight, double eps) {
        Vec squares = zeros();
        for (int64_t i = 0; i < dim; i += kWidth) {
            squares = fma(load(values + i), load(values + i), squares);
        }
        const float mean = sum(squares) / static_cast<float>(dim);
        const Vec factor = broadcast(1.0f / std::sqrt(mean + static_cast<float>(eps)));
        for_vectors(dim, [&](int64_t i, int64_t count) {
            store(values + i, mul(mul(load(values + i), factor), load_up_to(weight + i, count)));
        });
    }

    void rotate(const float* cosines, const float* sines, int64_t num_pairs, bool is_interleaved) {
        if (is_interleaved) {
            for (int64_t i = 0; i < num_pairs; ++i) {
                const float first = values[2 * i], second = values[2 * i + 1];
                values[2 * i] = first * cosines[i] - second * sines[i];
                values[2 * i + 1] = second * cosines[i] + first * sines[i];
            }
            return;
        }
        for_vectors(num_pairs, [&](int64_t i, int64_t count) {
            const Vec cosine = load_up_to(cosines + i, count), sine = load_up_to(sines + i, count);
            const Vec first = load(values + i), second = load_up_to(values + num_pairs + i, count);
            store_up_to(values + i, sub(mul(first, cosine), mul(second, sine)), count);
            store_up_to(values + num_pairs + i, fma(second, cosine, mul(first, sine)), count);
        });
    }
};

template <typename T>
void turn(const HeadsArgs& args, int64_t token, const void* norm, Head& head) {
    if (norm != nullptr) {
        args.norm_format == args.format ? head.normalise(static_cast<const T*>(norm), args.eps)
                                        : head.normalise(static_cast<const float*>(norm), args.eps);
    }
    if (args.cosines != nullptr) {
        const int64_t place = args.positions[token] * args.num_pairs;
        head.rotate(args.cosines + place, args.sines + place, args.num_pairs, args.is_interleaved);
    }
}

void store_head(const Head& head, void* cache, float* scales, int64_t index, int64_t format) {
    const int64_t place = index * head.dim;
    switch (format) {
        case kFloat32:
            return head.write(static_cast<float*>(cache) + place);
        case kBfloat16:
            return head.write(static_cast<bf16*>(cache) + place);
        default:
            scales[index] = quantise(head.values, static_cast<int8_t*>(cache) + place, head.dim);
    }
}

// Asks for the memory of a token's keys or values, which will be written.
void prefetch_slot(const void* cache, int64_t slot, int64_t num_elements, int64_t format) {
    const int64_t bytes = num_elements * (format == kFloat32 ? 4 : format == kBfloat16 ? 2 : 1);
    const char* const first = static_cast<const char*>(cache) + slot * bytes;
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(first + i, 1);
    }
}

template <typename T>
void write_token(const HeadsArgs& args, int64_t token) {
    const int64_t slot = args.num_kv_heads ? args.slots[token] : -1;
    if (slot >= 0) {
        prefetch_slot(args.key_cache, slot, args.num_kv_heads * args.head_dim, args.cache_format);
        prefetch_slot(args.value_cache, slot, args.num_kv_heads * args.value_dim, args.cache_format);
    }
    const int64_t width = std::max(args.head_dim, args.value_dim) + kWidth;
    Head head = {static_cast<float*>(__builtin_alloca_with_align(width * sizeof(float), 512)), args.head_dim};
    for (int64_t i = 0; i < args.num_heads; ++i) {
        T* query = static_cast<T*>(args.query) + token * args.query_stride + i * args.query_head_stride;
        head.read(query);
        turn<T>(args, token, args.query_norm, head);
        head.write(query);
    }
    if (slot < 0) {
        return;
    }
    for (int64_t i = 0; i < args.num_kv_heads; ++i) {
        const int64_t index = slot * args.num_kv_heads + i;
        head.dim = args.head_dim;
        head.read(static_cast<const T*>(args.key) + token * args.key_stride + i * args.head_dim);
        turn<T>(args, token, args.key_norm, head);
        store_head(head, args.key_cache, args.key_scales, index, args.cache_format);
        head.dim = args.value_dim;
        head.read(static_cast<const T*>(args.value) + token * args.value_stride + i * args.value_dim);
        store_head(head, args.value_cache, args.value_scales, index, args.cache_format);
    }
}

template <typename T>
void write_tokens(const HeadsArgs& args) {
    const int64_t cost = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
    for_rows(args.num_tokens, cost, kWorthThreads, [&](int64_t token) { write_token<T>(args, token); });
}

void write_heads(const HeadsArgs& args) {
    args.format == kBfloat16 ? write_tokens<bf16>(args) : write_tokens<float>(args);
}

void write_rows(const RowsArgs& args) {
    for_rows(args.num_tokens, args.row_bytes / 4, kWorthThreads, [&](int64_t token) {
        if (args.slots[token] >= 0) {
            const char* from = static_cast<const char*>(args.values) + token * args.token_stride;
            std::memcpy(static_cast<char*>(args.cache) + args.slots[token] * args.row_bytes, from, args.row_bytes);
        }
    });
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// `norm_rope_write`; without queries `write_kv`, without keys `rope`.
LS_EXPORT void ls_write_heads(const HeadsArgs* args) { run_kernel<write_heads>(args); }

// Copies rows into the slots of one cache tensor; a slot below 0 is skipped.
LS_EXPORT void ls_write_rows(const RowsArgs* args) { run_kernel<write_rows>(args); }
