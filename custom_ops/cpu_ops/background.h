// Threads for work beside steps.
#pragma once

#include <functional>

namespace fd {

// Calls body on up to `threads` new threads of a low priority, and waits for all of them. Throws the first exception of
// a body, or the error of the system if no thread can be started. The priority of the calling thread is not changed.
void run_in_background(int threads, const std::function<void()>& body);

}  // namespace fd
