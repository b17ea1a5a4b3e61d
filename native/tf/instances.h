// Which copy of a reduction in a graph a kernel belongs to.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "tf_api.h"

namespace gradred::tf {

// Note [Instances]
// Names of domains are given while a function is traced, by what that function does alone: what a
// rank has traced before, or traced in vain, changes nothing. So one graph may have several
// reductions of one name: functions of one name, or one function that is called several times, of
// whose body TensorFlow puts a copy at each call. It does not order the copies unless they write
// variables, and ranks may reach them in different orders: each must be a domain of its own.
//
// Copies differ by the path of their nodes. Within one graph they are numbered in the order of
// their paths, digits by their value: Keras and TensorFlow count up, from numbers that differ
// between ranks. The first keeps the name. Nothing is kept from one graph to the next: the paths of
// other graphs are a rank's own history. One thread makes all kernels of a function's graph, and
// then the first of them runs: so a graph is what one thread has made since then.
//
// Sessions of tf.compat.v1 make kernels as they are asked for. There names differ by the whole
// graph but for the copies, and numbers once given stay for as long as the process lives.
class Instance {
 public:
  // In the construction of a kernel. key: see Note [Names of specs].
  Instance(TF_OpKernelConstruction* construction, std::string key);
  ~Instance();

  const std::string& key() const { return key_; }
  int Number() const;          // when the kernel runs; 0 for the only copy
  std::string Suffix() const;  // "" for number 0, else "+<number>"

 private:
  struct Copies;    // those in one graph
  struct Registry;  // of those

  const std::string key_;
  std::string path_;
  std::shared_ptr<Copies> copies_;
  mutable std::atomic<int> number_{-1};
};

}  // namespace gradred::tf
