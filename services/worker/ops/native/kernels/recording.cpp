#include "recording.h"

#include "abi.h"

namespace lockstep {

namespace {

thread_local Recording* current = nullptr;

}  // namespace

Recording* current_recording() { return current; }

void Recording::add(Kernel kernel, const void* args, size_t bytes) {
    const size_t place = arguments_.size();
    arguments_.resize(place + bytes / sizeof(uint64_t));
    std::memcpy(arguments_.data() + place, args, bytes);
    calls_.push_back({kernel, place});
}

void Recording::replay() const {
    for (const Call& call : calls_) call.kernel(arguments_.data() + call.place);
}

}  // namespace lockstep

using namespace lockstep;

LS_EXPORT Recording* ls_new_recording() { return new Recording; }

LS_EXPORT void ls_delete_recording(Recording* recording) { delete recording; }

// Adds this thread's calls to `recording` from now on; null: to none.
LS_EXPORT void ls_record(Recording* recording) { current = recording; }

LS_EXPORT void ls_replay(const Recording* recording) { recording->replay(); }
