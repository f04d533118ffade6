#include "background.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fd {
namespace {

// A thread of nice 10 has a tenth of the weight of one of nice 0 (110 to 1024, sched_prio_to_weight of the kernel).
// Beside steps that want all cores, the work gets a tenth of them.
constexpr int kNice = 10;

void lower_priority() { setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice); }

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
  } catch (const std::system_error&) {
    if (workers.empty()) throw;  // with fewer threads the work takes longer
  }
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fd
