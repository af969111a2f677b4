// What is around the gated delta rule of a recurrent layer: a causal convolution, and gates. All is computed in float32.
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
// Channels that a piece of a convolution has.
constexpr int64_t kChannels = 256;
#if defined(__AVX512F__)
// Vectors of channels that are convolved together: their windows stay in registers.
constexpr int kConvVectors = 4;
#else
constexpr int kConvVectors = 2;
#endif

struct ConvArgs {
    const void* x;
    const void* weight;  // [num_taps, num_channels]
    void* state;         // [slots, num_taps - 1, num_channels]
    void* output;        // [tokens, num_channels]
    const int64_t* slots;
    const int32_t* starts;  // [num_seqs + 1]
    int64_t num_seqs, num_channels, num_taps;  // 2 to 4 taps
    int64_t token_stride, slot_stride;
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

// `kVectors` vectors of channels of a sequence, or one of `count` channels: the window moves on from token to token.
template <int kTaps, int kVectors, typename T>
void convolve(const ConvArgs& args, int64_t seq, int64_t channel, int64_t count) {
    const T* weight = static_cast<const T*>(args.weight) + channel;
    T* state = static_cast<T*>(args.state) + args.slots[seq] * args.slot_stride + channel;
    using Vectors = std::array<Vec, kVectors>;
    std::array<Vectors, kTaps> taps, window;
    for (int tap = 0; tap < kTaps; ++tap) {
        for (int i = 0; i < kVectors; ++i) taps[tap][i] = load_up_to(weight + tap * args.num_channels + i * kWidth, count);
    }
    for (int tap = 0; tap + 1 < kTaps; ++tap) {
        for (int i = 0; i < kVectors; ++i) window[tap][i] = load_up_to(state + tap * args.num_channels + i * kWidth, count);
    }
    for (int64_t token = args.starts[seq]; token < args.starts[seq + 1]; ++token) {
        const T* x = static_cast<const T*>(args.x) + token * args.token_stride + channel;
        T* output = static_cast<T*>(args.output) + token * args.num_channels + channel;
        for (int i = 0; i < kVectors; ++i) {
            window[kTaps - 1][i] = load_up_to(x + i * kWidth, count);
            Vec total = mul(window[0][i], taps[0][i]);
            for (int tap = 1; tap < kTaps; ++tap) total = fma(window[tap][i], taps[tap][i], total);
            store_up_to(output + i * kWidth, silu(total), count);
            for (int tap = 0; tap + 1 < kTaps; ++tap) window[tap][i] = window[tap + 1][i];
        }
    }
    for (int tap = 0; tap + 1 < kTaps; ++tap) {
        for (int i = 0; i < kVectors; ++i) store_up_to(state + tap * args.num_channels + i * kWidth, window[tap][i], count);
    }
}

template <int kTaps, typename T>
void causal_conv(const ConvArgs& args) {
    const int64_t blocks = (args.num_channels + kChannels - 1) / kChannels;
    const int64_t cost = 4 * args.starts[args.num_seqs] * std::min(kChannels, args.num_channels) / args.num_seqs;
    for_rows(args.num_seqs * blocks, cost, kWorthThreads, [&](int64_t piece) {
        const int64_t seq = piece / blocks;
        int64_t channel = piece % blocks * kChannels;
        const int64_t end = std::min(channel + kChannels, args.num_channels);
        for (; channel + kConvVectors * kWidth <= end; channel += kConvVectors * kWidth) {
            convolve<kTaps, kConvVectors, T>(args, seq, channel, kWidth);
        }
        for (; channel < end; channel += kWidth) convolve<kTaps, 1, T>(args, seq, channel, std::min(kWidth, end - channel));
    });
}

template <typename T>
void causal_conv_by_taps(const ConvArgs& args) {
    switch (args.num_taps) {
        case 2: return causal_conv<2, T>(args);
        case 3: return causal_conv<3, T>(args);
        default: return causal_conv<4, T>(args);
    }
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
    run_kernel<by_format<causal_conv_by_taps<bf16>, causal_conv_by_taps<float>, ConvArgs>>(args);
}

LS_EXPORT void ls_gated_norm(const GatedNormArgs* args) {
    run_kernel<by_format<gated_norm<bf16>, gated_norm<float>, GatedNormArgs>>(args);
}

LS_EXPORT void ls_mul_sigmoid(const MulSigmoidArgs* args) {
    run_kernel<by_format<mul_sigmoid<bf16>, mul_sigmoid<float>, MulSigmoidArgs>>(args);
}
