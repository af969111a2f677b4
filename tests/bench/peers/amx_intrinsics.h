// gcc's intrinsics for AMX, with the memory that they read and write: put in front of every source (`-include`).
//
// Up to gcc 14 their assembly names no memory. So the compiler drops stores that only a tile would read, such as those of a
// tile configuration on the stack, and llama.cpp crashes (ggml-org/llama.cpp, issue 20824).
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)

#include <immintrin.h>

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored

#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)) : "memory")
#define _tile_loadd(tile, base, stride) LOCKSTEP_TILE_LOAD("tileloadd", tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) LOCKSTEP_TILE_LOAD("tileloaddt1", tile, base, stride)
#define LOCKSTEP_TILE_LOAD(name, tile, base, stride) \
    __asm__ volatile(name " (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")
#define _tile_stored(tile, base, stride) LOCKSTEP_TILE_STORE(tile, base, stride)
#define LOCKSTEP_TILE_STORE(tile, base, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(base)), "r"((long)(stride)) : "memory")

#endif
