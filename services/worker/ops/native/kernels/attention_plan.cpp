// Cuts a step's attention into pieces of about equal cost, once for all layers with the same window.
#include <algorithm>

#include "attention.h"

namespace lockstep {
namespace {

// What it costs to attend from a row of a decode or of a chunk to a key, and to read the key, for each of the head's
// elements. Measured: 64 of these units take about a nanosecond.
constexpr int64_t kDecodeRowCost = 3;
constexpr int64_t kChunkRowCost = 2;
constexpr int64_t kKeyCost = 4;
// The cost from which another thread saves more than it takes to wake it, or to wait for it where cores are shared. With
// less work the other threads still spin when the next kernel wants them.
constexpr int64_t kWorthThreads = 1024 * 1024;
// A piece is at least this large: merging costs time too.
constexpr int64_t kMinPieceCost = 128 * 1024;
// Pieces for each thread: when one is descheduled, the others take its pieces.
constexpr int64_t kPiecesPerThread = 8;

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

class Planner {
  public:
    explicit Planner(const PlanArgs& args) : args_(args), group_size_(args.num_heads / args.num_kv_heads) {}

    void plan() {
        int64_t total = 0;
        for_each([&](Piece& piece) { total += cost(piece); });
        const bool is_parallel = args_.num_threads > 1 && total >= kWorthThreads;
        args_.sizes[1] = is_parallel ? args_.num_threads : 1;
        const int64_t share = total / (args_.num_threads * kPiecesPerThread);
        const int64_t target = is_parallel ? std::max(share, kMinPieceCost) : total + 1;
        for_each([&](Piece& piece) { add_parts(piece, target); });
        args_.sizes[0] = num_pieces_;
        args_.sizes[2] = scratch_size_;
        args_.sizes[3] = num_partials_ * partial_size(args_.value_dim);
        args_.sizes[4] = num_counters_;
    }

  private:
    // Calls `body` for all rows of the step, in blocks that see about the same keys.
    template <typename Body>
    void for_each(Body body) const {
        for (int64_t sequence = 0; sequence < args_.num_seqs; ++sequence) {
            const int64_t first = args_.cu_seqlens_q[sequence], count = args_.cu_seqlens_q[sequence + 1] - first;
            Piece piece = {};
            piece.sequence = sequence;
            piece.is_chunk = count > kMaxDecodeTokens || count * group_size_ > kMaxDecodeRows;
            const int64_t most_rows = piece.is_chunk ? kMaxChunkRows : kMaxRows;
            const int64_t heads = std::min(group_size_, most_rows);
            const int64_t tokens = std::min(count, most_rows / heads);
            const int64_t kv_heads = piece.is_chunk ? 1 : std::min(args_.num_kv_heads, most_rows / (heads * tokens));
            for (int64_t token = 0; token < count; token += tokens) {
                piece.first_token = first + token;
                piece.first_position = args_.context_lens[sequence] - count + token;
                piece.num_tokens = std::min(tokens, count - token);
                piece.key_begin = std::max<int64_t>(0, args_.window ? piece.first_position + 1 - args_.window : 0);
                piece.key_end = piece.first_position + piece.num_tokens;
                for (int64_t head = 0; head < group_size_; head += heads) {
                    piece.first_group_head = head;
                    piece.num_group_heads = std::min(heads, group_size_ - head);
                    for (int64_t kv_head = 0; kv_head < args_.num_kv_heads; kv_head += kv_heads) {
                        piece.first_kv_head = kv_head;
                        piece.num_kv_heads = std::min(kv_heads, args_.num_kv_heads - kv_head);
                        body(piece);
                    }
                }
            }
        }
    }

    int64_t cost(const Piece& piece) const {
        const int64_t row_cost = piece.is_chunk ? kChunkRowCost : kDecodeRowCost;
        const int64_t rows = piece.num_kv_heads * (kKeyCost + row_cost * piece.rows_per_kv_head());
        return rows * (piece.key_end - piece.key_begin) * args_.head_dim;
    }

    void add_parts(const Piece& whole, int64_t target) {
        const int64_t num_keys = whole.key_end - whole.key_begin;
        const int64_t num_tiles = divide_up(num_keys, kTile);
        const int64_t num_parts = std::clamp<int64_t>(divide_up(cost(whole), target), 1, std::max<int64_t>(num_tiles, 1));
        Piece piece = whole;
        piece.num_parts = num_parts;
        piece.first_partial = num_partials_;
        piece.counter = num_counters_;
        for (int64_t part = 0; part < num_parts; ++part) {
            piece.part = part;
            piece.key_begin = whole.key_begin + part * num_tiles / num_parts * kTile;
            const int64_t end = whole.key_begin + (part + 1) * num_tiles / num_parts * kTile;
            piece.key_end = std::min<int64_t>(end, whole.key_end);
            if (num_pieces_ < args_.capacity) {
                args_.pieces[num_pieces_] = piece;
            }
            ++num_pieces_;
        }
        if (num_parts > 1) {
            num_partials_ += num_parts * whole.num_rows();
            ++num_counters_;
        }
        const int64_t size = Scratch().lay_out(nullptr, whole.num_rows(), args_.head_dim, args_.value_dim, whole.is_chunk);
        scratch_size_ = std::max(scratch_size_, size);
    }

    const PlanArgs& args_;
    const int64_t group_size_;
    int64_t num_pieces_ = 0, num_partials_ = 0, num_counters_ = 0, scratch_size_ = 0;
};

}  // namespace

void plan(const PlanArgs& args) { Planner(args).plan(); }

}  // namespace lockstep
