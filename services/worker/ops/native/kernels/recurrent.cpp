// Recurrent layers: a causal convolution, the gated delta rule, and gates. All is computed in float32.
//
// A sequence's tokens are walked one after the other, so a prompt costs a token what a decode does, but for its state,
// which stays in a processor's cache.
#include <algorithm>
#include <array>
#include <cmath>

#include "pool.h"
#include "recording.h"
#include "simd.h"

namespace lockstep {
namespace {

// Elements from which a second thread saves more than it costs to wake it.
constexpr int64_t kWorthThreads = 64 * 1024;
// Channels that a piece of a convolution has, and the most values that one adds up.
constexpr int64_t kChannels = 256;
constexpr int64_t kMaxTaps = 8;
// Tokens whose keys, queries and gates are computed before any of them is written into a state.
constexpr int64_t kTile = 32;
// Vectors of a state's row that stay in the fastest cache, for all of its rows, while a tile is walked.
constexpr int kColumns = 4;
constexpr float kNormEps = 1e-6f;

struct ConvArgs {
    const void* x;
    const void* weight;  // [num_taps, num_channels]
    void* state;         // [slots, num_taps - 1, num_channels]
    void* output;        // [tokens, num_channels]
    const int64_t* slots;
    const int32_t* starts;  // [num_seqs + 1]
    int64_t num_seqs, num_channels, num_taps;
    int64_t token_stride, slot_stride;
    int64_t format;
};

struct DeltaArgs {
    const void* qkv;
    const void* gates;   // [tokens, 2 * num_heads]: b, then a
    const float* decay;  // [num_heads]
    const float* bias;   // [num_heads]
    float* state;        // [slots, num_heads, key_dim, value_dim]
    void* output;        // [tokens, num_heads, value_dim]
    const int64_t* slots;
    const int32_t* starts;  // [num_seqs + 1]
    int64_t num_seqs, num_key_heads, num_heads, key_dim, value_dim;
    int64_t token_stride, gates_stride, slot_stride;
    int64_t format;
};

struct GatedNormArgs {
    const void* x;
    const void* gate;
    const void* weight;
    void* output;
    int64_t num_tokens, num_heads, dim;
    int64_t gate_stride;
    double eps;
    int64_t format;
};

struct MulSigmoidArgs {
    void* x;
    const void* gate;
    int64_t num_tokens, dim;
    // 1: one gate for each token.
    int64_t gate_dim, gate_stride;
    int64_t format;
};

Vec sigmoid(Vec x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zeros(), x)))); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// As torch's, which is linear above 20.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
void convolve(const ConvArgs& args, int64_t seq, int64_t channel, int64_t count) {
    const int64_t kept = args.num_taps - 1;
    const T* weight = static_cast<const T*>(args.weight) + channel;
    T* state = static_cast<T*>(args.state) + args.slots[seq] * args.slot_stride + channel;
    std::array<Vec, kMaxTaps> taps, window;
    for (int64_t tap = 0; tap <= kept; ++tap) taps[tap] = load_up_to(weight + tap * args.num_channels, count);
    for (int64_t tap = 0; tap < kept; ++tap) window[tap] = load_up_to(state + tap * args.num_channels, count);
    for (int64_t token = args.starts[seq]; token < args.starts[seq + 1]; ++token) {
        const T* x = static_cast<const T*>(args.x) + token * args.token_stride + channel;
        window[kept] = load_up_to(x, count);
        Vec total = mul(window[0], taps[0]);
        for (int64_t tap = 1; tap <= kept; ++tap) total = fma(window[tap], taps[tap], total);
        T* output = static_cast<T*>(args.output) + token * args.num_channels + channel;
        store_up_to(output, silu(total), count);
        for (int64_t tap = 0; tap < kept; ++tap) window[tap] = window[tap + 1];
    }
    for (int64_t tap = 0; tap < kept; ++tap) store_up_to(state + tap * args.num_channels, window[tap], count);
}

template <typename T>
void causal_conv(const ConvArgs& args) {
    const int64_t blocks = (args.num_channels + kChannels - 1) / kChannels;
    const int64_t cost = 4 * args.starts[args.num_seqs] * std::min(kChannels, args.num_channels) / args.num_seqs;
    for_rows(args.num_seqs * blocks, cost, kWorthThreads, [&](int64_t piece) {
        const int64_t seq = piece / blocks, first = piece % blocks * kChannels;
        for_vectors(std::min(kChannels, args.num_channels - first),
                    [&](int64_t i, int64_t count) { convolve<T>(args, seq, first + i, count); });
    });
}

// What the delta rule reads of a token for one head.
struct TokenGates {
    float decay, beta;
};

// Writes a head's vector times `scale` divided by its length.
template <typename T>
void write_unit(const T* from, float* to, int64_t dim, float scale) {
    Vec squares = zeros();
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec values = load_up_to(from + i, count);
        squares = fma(values, values, squares);
    });
    const Vec factor = broadcast(scale / std::sqrt(sum(squares) + kNormEps));
    for_vectors(dim, [&](int64_t i, int64_t count) { store_up_to(to + i, mul(load_up_to(from + i, count), factor), count); });
}

// One token's part of some columns of a state, `kVectors` whole vectors, or one of `count` columns.
template <int kVectors, typename T>
void walk(float* state, int64_t key_dim, int64_t stride, const float* query, const float* key, TokenGates gates,
          const T* value, T* output, int64_t count) {
    // Two sums for each vector: one alone would wait for itself.
    std::array<Vec, kVectors> known, more, read;
    known.fill(zeros());
    more.fill(zeros());
    read.fill(zeros());
    int64_t row = 0;
    for (; row + 2 <= key_dim; row += 2) {
        const Vec first = broadcast(key[row]), second = broadcast(key[row + 1]);
        const float* values = state + row * stride;
        for (int i = 0; i < kVectors; ++i) {
            known[i] = fma(first, load_up_to(values + i * kWidth, count), known[i]);
            more[i] = fma(second, load_up_to(values + stride + i * kWidth, count), more[i]);
        }
    }
    if (row < key_dim) {
        const Vec first = broadcast(key[row]);
        for (int i = 0; i < kVectors; ++i) {
            known[i] = fma(first, load_up_to(state + row * stride + i * kWidth, count), known[i]);
        }
    }
    const Vec decay = broadcast(gates.decay), beta = broadcast(gates.beta);
    std::array<Vec, kVectors> update;
    for (int i = 0; i < kVectors; ++i) {
        const Vec decayed = mul(decay, add(known[i], more[i]));
        update[i] = mul(beta, sub(load_up_to(value + i * kWidth, count), decayed));
    }
    for (row = 0; row < key_dim; ++row) {
        const Vec of_key = broadcast(key[row]), of_query = broadcast(query[row]);
        float* values = state + row * stride;
        for (int i = 0; i < kVectors; ++i) {
            const Vec next = fma(of_key, update[i], mul(decay, load_up_to(values + i * kWidth, count)));
            store_up_to(values + i * kWidth, next, count);
            read[i] = fma(of_query, next, read[i]);
        }
    }
    for (int i = 0; i < kVectors; ++i) store_up_to(output + i * kWidth, read[i], count);
}

template <typename T>
void walk_head(const DeltaArgs& args, int64_t seq, int64_t head) {
    thread_local Buffer buffer;
    const int64_t key_dim = args.key_dim, value_dim = args.value_dim;
    const int64_t key_head = head * args.num_key_heads / args.num_heads, keys = args.num_key_heads * key_dim;
    float* state = args.state + args.slots[seq] * args.slot_stride + head * key_dim * value_dim;
    auto* queries = reinterpret_cast<float*>(buffer.reserve(2 * kTile * key_dim * static_cast<int64_t>(sizeof(float))));
    float* units = queries + kTile * key_dim;
    std::array<TokenGates, kTile> gates;
    const int64_t end = args.starts[seq + 1];
    for (int64_t first = args.starts[seq]; first < end; first += kTile) {
        const int64_t count = std::min(kTile, end - first);
        for (int64_t i = 0; i < count; ++i) {
            const T* token = static_cast<const T*>(args.qkv) + (first + i) * args.token_stride;
            const T* gate = static_cast<const T*>(args.gates) + (first + i) * args.gates_stride + head;
            write_unit(token + key_head * key_dim, queries + i * key_dim, key_dim,
                       1.0f / std::sqrt(static_cast<float>(key_dim)));
            write_unit(token + keys + key_head * key_dim, units + i * key_dim, key_dim, 1.0f);
            const float a = to_float(gate[args.num_heads]) + args.bias[head];
            gates[i] = {std::exp(args.decay[head] * softplus(a)), sigmoid(to_float(gate[0]))};
        }
        const auto walk_columns = [&]<int kVectors>(int64_t column, int64_t width) {
            for (int64_t i = 0; i < count; ++i) {
                const T* value = static_cast<const T*>(args.qkv) + (first + i) * args.token_stride + 2 * keys +
                                 head * value_dim + column;
                T* output = static_cast<T*>(args.output) + ((first + i) * args.num_heads + head) * value_dim + column;
                walk<kVectors>(state + column, key_dim, value_dim, queries + i * key_dim, units + i * key_dim, gates[i],
                               value, output, width);
            }
        };
        int64_t column = 0;
        for (; column + kColumns * kWidth <= value_dim; column += kColumns * kWidth) {
            walk_columns.template operator()<kColumns>(column, kWidth);
        }
        for (; column < value_dim; column += kWidth) {
            walk_columns.template operator()<1>(column, std::min(kWidth, value_dim - column));
        }
    }
}

template <typename T>
void delta_rule(const DeltaArgs& args) {
    const int64_t cost = 2 * args.key_dim * args.value_dim * args.starts[args.num_seqs] / args.num_seqs;
    for_rows(args.num_seqs * args.num_heads, cost, kWorthThreads,
             [&](int64_t piece) { walk_head<T>(args, piece / args.num_heads, piece % args.num_heads); });
}

template <typename T>
void gated_norm(const GatedNormArgs& args) {
    for_rows(args.num_tokens * args.num_heads, 4 * args.dim, kWorthThreads, [&](int64_t row) {
        const int64_t token = row / args.num_heads, head = row % args.num_heads;
        const T* x = static_cast<const T*>(args.x) + row * args.dim;
        const T* gate = static_cast<const T*>(args.gate) + token * args.gate_stride + head * args.dim;
        const T* weight = static_cast<const T*>(args.weight);
        T* output = static_cast<T*>(args.output) + row * args.dim;
        Vec squares = zeros();
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            const Vec values = load_up_to(x + i, count);
            squares = fma(values, values, squares);
        });
        const float mean = sum(squares) / static_cast<float>(args.dim);
        const Vec factor = broadcast(1.0f / std::sqrt(mean + static_cast<float>(args.eps)));
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            const Vec normed = mul(mul(load_up_to(x + i, count), factor), load_up_to(weight + i, count));
            store_up_to(output + i, mul(normed, silu(load_up_to(gate + i, count))), count);
        });
    });
}

template <typename T>
void mul_sigmoid(const MulSigmoidArgs& args) {
    for_rows(args.num_tokens, 4 * args.dim, kWorthThreads, [&](int64_t row) {
        T* x = static_cast<T*>(args.x) + row * args.dim;
        const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
        const Vec shared = broadcast(sigmoid(to_float(gate[0])));
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            const Vec factor = args.gate_dim == 1 ? shared : sigmoid(load_up_to(gate + i, count));
            store_up_to(x + i, mul(load_up_to(x + i, count), factor), count);
        });
    });
}

// The kernel for the call's format.
template <auto kBfloat16Kernel, auto kFloat32Kernel, class Args>
void by_format(const Args& args) {
    args.format == kBfloat16 ? kBfloat16Kernel(args) : kFloat32Kernel(args);
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

LS_EXPORT void ls_causal_conv(const ConvArgs* args) {
    run_kernel<by_format<causal_conv<bf16>, causal_conv<float>, ConvArgs>>(args);
}

LS_EXPORT void ls_delta_rule(const DeltaArgs* args) {
    run_kernel<by_format<delta_rule<bf16>, delta_rule<float>, DeltaArgs>>(args);
}

LS_EXPORT void ls_gated_norm(const GatedNormArgs* args) {
    run_kernel<by_format<gated_norm<bf16>, gated_norm<float>, GatedNormArgs>>(args);
}

LS_EXPORT void ls_mul_sigmoid(const MulSigmoidArgs* args) {
    run_kernel<by_format<mul_sigmoid<bf16>, mul_sigmoid<float>, MulSigmoidArgs>>(args);
}
