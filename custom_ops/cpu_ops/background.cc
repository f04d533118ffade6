#include "background.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace fd {
namespace {

// Ten nice values are a tenth of the weight (1024 of nice 0, 110 of nice 10: sched_prio_to_weight of the kernel).
// Beside steps that want all cores, the work gets a tenth of them. The whole process may have a nice value of its own.
constexpr int kMoreNice = 10;

void lower_priority() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + kMoreNice);  // cut to 19 by the kernel
}

}  // namespace

void run_in_background(int threads, const std::function<void()>& body) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    lower_priority();
    try {
      body();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 0; i < threads; ++i) workers.emplace_back(run);
  } catch (...) {                // system_error or bad_alloc; threads that run must be joined
    if (workers.empty()) throw;  // with fewer threads the work takes longer
  }
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fd
