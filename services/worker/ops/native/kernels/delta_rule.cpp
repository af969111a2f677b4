// The gated delta rule, computed in float32: each head of each sequence has a state, which its tokens read and write.
//
// Tokens are taken in blocks of two or four. The state before a block is read once for all keys and queries of the block,
// and written once; what the block's own tokens add to what later ones of it read is a product of few numbers.
//
// Source: arXiv:2412.06464, section 3.3, the chunkwise form, in its smallest blocks: larger ones multiply as much.
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
// Tokens whose keys, queries and gates are computed before any of them is written into a state.
constexpr int64_t kTile = 32;
#if defined(__AVX512F__)
// Tokens of a block; vectors of a state's row that one token, and that a block, reads at a time: the sums stay in registers.
constexpr int kBlock = 4, kTokenColumns = 8, kBlockColumns = 2;
#else
constexpr int kBlock = 2, kTokenColumns = 4, kBlockColumns = 2;
#endif
// Blocks of a tile from which a copy of the state's columns saves more than it costs.
constexpr int kBlocksWorthCopy = 4;
constexpr float kNormEps = 1e-6f;
constexpr int64_t kLine = 64;

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
    int64_t is_tiled;  // whether value heads of all key heads lie in turns
    int64_t format;
};

// Columns of a state, or a copy of them.
struct Columns {
    float* values;
    int64_t stride;  // from row to row
};

// What the delta rule reads of a head's next tokens.
struct Block {
    int count = 0;
    // [count][key_dim] each, of length 1; queries are scaled too.
    const float *keys = nullptr, *queries = nullptr;
    std::array<float, kBlock> beta;
    // The part of the state before the block that is left at a token.
    std::array<float, kBlock> left;
    // The part that a token's key, and its query, reads of what an earlier token wrote: [token][earlier token]; a query also
    // reads what its own token wrote.
    std::array<std::array<float, kBlock>, kBlock> known, read;
    // The part of what a token wrote that is left after the block.
    std::array<float, kBlock> kept;
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// As torch's, which is linear above 20.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

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

float dot(const float* a, const float* b, int64_t dim) {
    Vec total = zeros();
    for_vectors(dim, [&](int64_t i, int64_t count) { total = fma(load_up_to(a + i, count), load_up_to(b + i, count), total); });
    return sum(total);
}

Block make_block(int count, const float* keys, const float* queries, const float* decay, const float* beta, int64_t key_dim) {
    Block block;
    block.count = count;
    block.keys = keys;
    block.queries = queries;
    float left = 1.0f;
    for (int token = 0; token < count; ++token) {
        block.beta[token] = beta[token];
        block.left[token] = left *= decay[token];
        float kept = 1.0f;
        for (int earlier = token; earlier >= 0; --earlier) {
            const float* key = keys + earlier * key_dim;
            if (earlier < token) block.known[token][earlier] = kept * dot(key, keys + token * key_dim, key_dim);
            block.read[token][earlier] = kept * dot(key, queries + token * key_dim, key_dim);
            kept *= decay[earlier];
        }
    }
    float kept = 1.0f;
    for (int token = count - 1; token >= 0; --token) {
        block.kept[token] = kept;
        kept *= decay[token];
    }
    return block;
}

// A block's part of some columns of a state: `kVectors` vectors of `count` columns. `next`, if any, is what the thread needs
// after them, and is asked for row by row.
template <int kTokens, int kVectors, typename T>
void walk(const Columns& state, int64_t key_dim, const Block& block, const T* values, int64_t values_stride, T* output,
          int64_t output_stride, int64_t count, const float* next) {
    using Sums = std::array<std::array<Vec, kVectors>, kTokens>;
    Sums known, read;
    for (int token = 0; token < kTokens; ++token) {
        known[token].fill(zeros());
        read[token].fill(zeros());
    }
    for (int64_t row = 0; row < key_dim; ++row) {
        const float* from = state.values + row * state.stride;
        std::array<Vec, kVectors> loaded;
        for (int i = 0; i < kVectors; ++i) loaded[i] = load(from + i * kWidth);
        for (int token = 0; token < kTokens; ++token) {
            const Vec key = broadcast(block.keys[token * key_dim + row]);
            const Vec query = broadcast(block.queries[token * key_dim + row]);
            for (int i = 0; i < kVectors; ++i) {
                known[token][i] = fma(key, loaded[i], known[token][i]);
                read[token][i] = fma(query, loaded[i], read[token][i]);
            }
        }
    }
    Sums update;
    for (int token = 0; token < kTokens; ++token) {
        const Vec left = broadcast(block.left[token]), beta = broadcast(block.beta[token]);
        for (int i = 0; i < kVectors; ++i) {
            Vec expected = mul(left, known[token][i]), result = mul(left, read[token][i]);
            for (int earlier = 0; earlier < token; ++earlier) {
                expected = fma(broadcast(block.known[token][earlier]), update[earlier][i], expected);
                result = fma(broadcast(block.read[token][earlier]), update[earlier][i], result);
            }
            const Vec value = load_up_to(values + token * values_stride + i * kWidth, count);
            update[token][i] = mul(beta, sub(value, expected));
            result = fma(broadcast(block.read[token][token]), update[token][i], result);
            store_up_to(output + token * output_stride + i * kWidth, result, count);
        }
    }
    for (int token = 0; token + 1 < kTokens; ++token) {
        for (Vec& each : update[token]) each = mul(broadcast(block.kept[token]), each);
    }
    const Vec left = broadcast(block.left[kTokens - 1]);
    for (int64_t row = 0; row < key_dim; ++row) {
        float* at = state.values + row * state.stride;
        std::array<Vec, kVectors> changed;
        for (int i = 0; i < kVectors; ++i) changed[i] = mul(left, load(at + i * kWidth));
        for (int token = 0; token < kTokens; ++token) {
            const Vec key = broadcast(block.keys[token * key_dim + row]);
            for (int i = 0; i < kVectors; ++i) changed[i] = fma(key, update[token][i], changed[i]);
        }
        for (int i = 0; i < kVectors; ++i) store(at + i * kWidth, changed[i]);
        if (next != nullptr) {
            const char* line = reinterpret_cast<const char*>(next + row * state.stride);
            for (int64_t i = 0; i < kVectors * kWidth * static_cast<int64_t>(sizeof(float)); i += kLine) {
                _mm_prefetch(line + i, _MM_HINT_T1);
            }
        }
    }
}

// One head of one sequence, whose tokens are walked tile by tile.
template <typename T>
class Head {
public:
    Head(const DeltaArgs& args, int64_t seq, int64_t head)
        : args_(args),
          head_(head),
          first_(args.starts[seq]),
          end_(args.starts[seq + 1]),
          state_(args.state + args.slots[seq] * args.slot_stride + head * args.key_dim * args.value_dim) {}

    const float* state() const { return state_; }

    // `next` is the state of the head that this thread turns to after this one, or null.
    void walk_tokens(const float* next) const {
        thread_local Buffer buffer;
        const int64_t units = kTile * args_.key_dim, copied = args_.key_dim * kBlockColumns * kWidth;
        auto* queries = reinterpret_cast<float*>(buffer.reserve((2 * units + copied) * static_cast<int64_t>(sizeof(float))));
        float *keys = queries + units, *copy = keys + units;
        for (int64_t first = first_; first < end_; first += kTile) {
            const int64_t count = std::min(kTile, end_ - first);
            std::array<Block, kTile> blocks;
            const int num_blocks = prepare(first, count, queries, keys, blocks);
            int64_t column = 0;
            if (count == 1) {
                for (; column + kTokenColumns * kWidth <= args_.value_dim; column += kTokenColumns * kWidth) {
                    const float* later = next == nullptr ? nullptr : next + column;
                    walk_block<1, kTokenColumns>(columns_at(column), blocks[0], first, column, kWidth, later);
                }
            }
            for (; column + kBlockColumns * kWidth <= args_.value_dim; column += kBlockColumns * kWidth) {
                if (num_blocks < kBlocksWorthCopy) {
                    walk_blocks<kBlockColumns>(columns_at(column), blocks.data(), num_blocks, first, column, kWidth);
                } else {
                    walk_copy<kBlockColumns>(copy, blocks.data(), num_blocks, first, column, kWidth);
                }
            }
            for (; column < args_.value_dim; column += kWidth) {
                walk_copy<1>(copy, blocks.data(), num_blocks, first, column, std::min(kWidth, args_.value_dim - column));
            }
        }
    }

private:
    const T* token(int64_t number) const { return static_cast<const T*>(args_.qkv) + number * args_.token_stride; }

    // Fills `blocks`; returns how many there are.
    int prepare(int64_t first, int64_t count, float* queries, float* keys, std::array<Block, kTile>& blocks) const {
        const int64_t key_dim = args_.key_dim;
        const int64_t key_head =
            args_.is_tiled ? head_ % args_.num_key_heads : head_ * args_.num_key_heads / args_.num_heads;
        const float scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
        std::array<float, kTile> decay, beta;
        for (int64_t i = 0; i < count; ++i) {
            const T* query = token(first + i) + key_head * key_dim;
            const T* gate = static_cast<const T*>(args_.gates) + (first + i) * args_.gates_stride + head_;
            write_unit(query, queries + i * key_dim, key_dim, scale);
            write_unit(query + args_.num_key_heads * key_dim, keys + i * key_dim, key_dim, 1.0f);
            decay[i] = std::exp(args_.decay[head_] * softplus(to_float(gate[args_.num_heads]) + args_.bias[head_]));
            beta[i] = sigmoid(to_float(gate[0]));
        }
        int num_blocks = 0;
        for (int64_t i = 0; i < count; i += blocks[num_blocks++].count) {
            const int size = count - i < kBlock ? 1 : kBlock;
            const int64_t place = i * key_dim;
            blocks[num_blocks] = make_block(size, keys + place, queries + place, &decay[i], &beta[i], key_dim);
        }
        return num_blocks;
    }

    Columns columns_at(int64_t column) const { return {state_ + column, args_.value_dim}; }

    // All blocks in a copy of some columns, which lies together and stays in the fastest cache.
    template <int kVectors>
    void walk_copy(float* copy, const Block* blocks, int num_blocks, int64_t first, int64_t column, int64_t count) const {
        const Columns columns{copy, kVectors * kWidth};
        float* values = state_ + column;
        for (int64_t row = 0; row < args_.key_dim; ++row) {
            for (int i = 0; i < kVectors; ++i) {
                const float* from = values + row * args_.value_dim + i * kWidth;
                store(copy + row * columns.stride + i * kWidth, load_up_to(from, count));
            }
        }
        walk_blocks<kVectors>(columns, blocks, num_blocks, first, column, count);
        for (int64_t row = 0; row < args_.key_dim; ++row) {
            for (int i = 0; i < kVectors; ++i) {
                const Vec changed = load(copy + row * columns.stride + i * kWidth);
                store_up_to(values + row * args_.value_dim + i * kWidth, changed, count);
            }
        }
    }

    template <int kVectors>
    void walk_blocks(const Columns& columns, const Block* blocks, int num_blocks, int64_t first, int64_t column,
                     int64_t count) const {
        for (int number = 0; number < num_blocks; first += blocks[number++].count) {
            if (blocks[number].count == kBlock) {
                walk_block<kBlock, kVectors>(columns, blocks[number], first, column, count, nullptr);
            } else {
                walk_block<1, kVectors>(columns, blocks[number], first, column, count, nullptr);
            }
        }
    }

    template <int kTokens, int kVectors>
    void walk_block(const Columns& columns, const Block& block, int64_t first, int64_t column, int64_t count,
                    const float* next) const {
        const int64_t value_dim = args_.value_dim, place = head_ * value_dim + column;
        const T* values = token(first) + 2 * args_.num_key_heads * args_.key_dim + place;
        const int64_t output_stride = args_.num_heads * value_dim;
        T* output = static_cast<T*>(args_.output) + first * output_stride + place;
        walk<kTokens, kVectors>(
            columns, args_.key_dim, block, values, args_.token_stride, output, output_stride, count, next);
    }

    const DeltaArgs& args_;
    int64_t head_, first_, end_;
    float* state_;
};

template <typename T>
void delta_rule(const DeltaArgs& args) {
    const int64_t cost = 2 * args.key_dim * args.value_dim * args.starts[args.num_seqs];
    const int64_t count = args.num_seqs * args.num_heads;
    const int64_t threads = cost * args.num_heads < kWorthThreads ? 1 : num_threads();
    // More pieces than threads, so that one that comes late has less to do.
    const int64_t num_pieces = std::min(count, threads * 4);
    const auto start_of = [&](int64_t piece) { return piece * count / num_pieces; };
    const auto head_of = [&](int64_t number) { return Head<T>(args, number / args.num_heads, number % args.num_heads); };
    for_pieces(num_pieces, threads, [&](int64_t piece) {
        const int64_t stop = start_of(piece + 1);
        for (int64_t number = start_of(piece); number < stop; ++number) {
            // Threads take pieces in turn.
            const int64_t next = number + 1 < stop ? number + 1 : start_of(std::min(piece + threads, num_pieces));
            head_of(number).walk_tokens(next < count ? head_of(next).state() : nullptr);
        }
    });
}

void delta_rule_by_format(const DeltaArgs& args) {
    args.format == kBfloat16 ? delta_rule<bf16>(args) : delta_rule<float>(args);
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

LS_EXPORT void ls_delta_rule(const DeltaArgs* args) { run_kernel<delta_rule_by_format>(args); }
