// What this machine can do at most, for `machine_rates.py`: `machine_rates NUM_THREADS NUM_BYTES` prints, as JSON, the
// rate at which all threads together read a buffer of this size, over and over, and their rates of multiply-adds in
// registers: of 8-bit integers in vectors, and of these and of bfloat16 in tiles, 0 where the system permits none, with
// the instructions that the worker's kernels use. Each is the best of many short rounds.

#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NUM_ROUNDS = 24, NUM_PRODUCTS = 1 << 20, MAX_THREADS = 1024 };
enum { NUM_TILE_PRODUCTS = 1 << 14 };
enum { READ, VECTORS, BYTE_TILES, BF16_TILES, NUM_KINDS };

#if defined(__AVX512VNNI__)
typedef __m512i vector;
#define WIDTH 64
#define LOAD(p) _mm512_load_si512(p)
#define OR(a, b) _mm512_or_si512(a, b)
#define FILL(x) _mm512_set1_epi8(x)
#define MULTIPLY_ADD(sum, a, b, ones, product) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
typedef __m256i vector;
#define WIDTH 32
#define LOAD(p) _mm256_load_si256(p)
#define OR(a, b) _mm256_or_si256(a, b)
#define FILL(x) _mm256_set1_epi8(x)
#define MULTIPLY_ADD(sum, a, b, ones, product)                                                             \
    __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"                    \
                     : "+x"(sum), "=&x"(product)                                                           \
                     : "x"(a), "x"(b), "x"(ones))
#endif

struct thread {
    pthread_t handle;
    pthread_barrier_t* barrier;
    unsigned char* bytes;
    size_t num_bytes;
    uint64_t sink;
    double started_at, ended_at;
};

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static uint64_t fold(vector value) {
    uint64_t words[WIDTH / 8], result = 0;
    memcpy(words, &value, sizeof words);
    for (int i = 0; i < WIDTH / 8; i++) result ^= words[i];
    return result;
}

static void read_once(struct thread* self) {
    vector sums[4] = {FILL(0), FILL(0), FILL(0), FILL(0)};
    for (size_t at = 0; at < self->num_bytes; at += 4 * WIDTH)
        for (int i = 0; i < 4; i++) sums[i] = OR(sums[i], LOAD((const vector*)(self->bytes + at + i * WIDTH)));
    self->sink ^= fold(OR(OR(sums[0], sums[1]), OR(sums[2], sums[3])));
}

// Each sum is a variable of its own: gcc keeps an array of so many in memory, and then measures its stores.
#define FOR_SUMS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define COUNT(i) +1
#define DECLARE(i) vector sum##i = FILL(i);
#define ADD_TO(i) MULTIPLY_ADD(sum##i, a, b, ones, product);
#define SINK(i) self->sink ^= fold(sum##i);

enum { NUM_SUMS = FOR_SUMS(COUNT) };

static void multiply_once(struct thread* self) {
    vector a = FILL(3), b = FILL(5), ones = FILL(1), product = FILL(0);
    FOR_SUMS(DECLARE)
    for (int round = 0; round < NUM_PRODUCTS / NUM_SUMS; round++) { FOR_SUMS(ADD_TO) }
    (void)ones, (void)product;
    FOR_SUMS(SINK)
}

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
// Palette 1; then for each tile 64 bytes in a row, and 16 rows.
static const struct {
    _Alignas(64) uint8_t head[16];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} shapes = {{1}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Linux, Documentation/arch/x86/xstate.rst: a process asks for the state of tiles.
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// Four independent sums, as the unit takes a product before it has finished the last.
#define MULTIPLY_TILES(name)                                               \
    for (int round = 0; round < NUM_TILE_PRODUCTS / 4; round++)            \
    __asm__ volatile(name " %tmm6, %tmm4, %tmm0\n\t" name " %tmm7, %tmm4, %tmm1\n\t" \
                     name " %tmm6, %tmm5, %tmm2\n\t" name " %tmm7, %tmm5, %tmm3")

static void multiply_tiles(int kind) {
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
    if (kind == BYTE_TILES)
        MULTIPLY_TILES("tdpbssd");
    else
        MULTIPLY_TILES("tdpbf16ps");
    __asm__ volatile("tilerelease");
}
#else
static int may_use_tiles(void) { return 0; }
static void multiply_tiles(int kind) { (void)kind; }
#endif

static int num_kinds;

static void* run(void* argument) {
    struct thread* self = argument;
    // Each thread touches its own part first, so that it lies in the memory of the thread's own node.
    memset(self->bytes, 1, self->num_bytes);
    for (int round = 0; round < NUM_ROUNDS; round++) {
        for (int kind = 0; kind < num_kinds; kind++) {
            pthread_barrier_wait(self->barrier);
            self->started_at = now_s();
            if (kind == READ)
                read_once(self);
            else if (kind == VECTORS)
                multiply_once(self);
            else
                multiply_tiles(kind);
            self->ended_at = now_s();
            pthread_barrier_wait(self->barrier);
        }
    }
    return NULL;
}

// From the first thread's start to the last one's end. The threads are at a barrier.
static double duration_s(const struct thread* threads, int num_threads) {
    double started_at = threads[0].started_at, ended_at = threads[0].ended_at;
    for (int i = 1; i < num_threads; i++) {
        if (threads[i].started_at < started_at) started_at = threads[i].started_at;
        if (threads[i].ended_at > ended_at) ended_at = threads[i].ended_at;
    }
    return ended_at - started_at;
}

int main(int argc, char** argv) {
    int num_threads = argc == 3 ? atoi(argv[1]) : 0;
    size_t share = num_threads > 0 ? (size_t)atoll(argv[2]) / num_threads / (4 * WIDTH) * (4 * WIDTH) : 0;
    if (num_threads < 1 || num_threads > MAX_THREADS || share == 0) return 2;
    num_kinds = may_use_tiles() ? NUM_KINDS : BYTE_TILES;
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, num_threads + 1);
    static struct thread threads[MAX_THREADS];
    for (int i = 0; i < num_threads; i++) {
        threads[i] = (struct thread){.barrier = &barrier, .num_bytes = share, .bytes = aligned_alloc(WIDTH, share)};
        if (threads[i].bytes == NULL || pthread_create(&threads[i].handle, NULL, run, &threads[i]) != 0) return 1;
    }
    double best_s[NUM_KINDS] = {1e9, 1e9, 1e9, 1e9};
    for (int round = 0; round < NUM_ROUNDS; round++) {
        for (int kind = 0; kind < num_kinds; kind++) {
            pthread_barrier_wait(&barrier);
            pthread_barrier_wait(&barrier);
            double seconds = duration_s(threads, num_threads);
            if (seconds < best_s[kind]) best_s[kind] = seconds;
        }
    }
    uint64_t sink = 0;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i].handle, NULL);
        sink ^= threads[i].sink;
    }
    double products = (double)(NUM_PRODUCTS / NUM_SUMS) * NUM_SUMS * WIDTH;
    // A tile's product: 16 rows, 16 columns, and a depth of 64 bytes.
    double byte_products = num_kinds == NUM_KINDS ? 16.0 * 16 * 64 * NUM_TILE_PRODUCTS : 0;
    printf("{\"read_bytes_per_s\": %.6g, \"int8_products_per_s\": %.6g, \"int8_tile_products_per_s\": %.6g, "
           "\"bf16_tile_products_per_s\": %.6g, \"sink\": %d}\n",
           share * num_threads / best_s[READ], products * num_threads / best_s[VECTORS],
           byte_products * num_threads / best_s[BYTE_TILES], byte_products / 2 * num_threads / best_s[BF16_TILES],
           (int)(sink & 1));
    return 0;
}
