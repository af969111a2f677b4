// Calls of kernels, kept so that all of them can be made again with one call from Python: a captured graph.
//
// A kernel that a decode step calls is exported through `run_kernel`. Its arguments are copied; the memory that they
// name must stay where it is, and what it holds is read anew.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace lockstep {

class Recording {
public:
    using Kernel = void (*)(const void* args);

    void add(Kernel kernel, const void* args, size_t bytes);

    // Makes the calls again, in their order.
    void replay() const;

private:
    struct Call {
        Kernel kernel;
        size_t place;  // in `arguments_`
    };

    std::vector<Call> calls_;
    std::vector<uint64_t> arguments_;
};

// What this thread's calls are added to; null while nothing is captured.
Recording* current_recording();

// Calls a kernel, and keeps the call if this thread is capturing.
template <auto kKernel, class Args>
auto run_kernel(const Args* args) {
    static_assert(sizeof(Args) % sizeof(uint64_t) == 0 && alignof(Args) <= alignof(uint64_t));
    if (Recording* recording = current_recording()) {
        recording->add([](const void* kept) { kKernel(*static_cast<const Args*>(kept)); }, args, sizeof(Args));
    }
    return kKernel(*args);
}

}  // namespace lockstep
