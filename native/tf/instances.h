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
// other graphs are a rank's own history.
//
// A kernel is not told its graph. One thread makes all kernels that a device runs of a graph, one
// after the other, before any of them runs, and after it has inferred shapes for TensorFlow's
// optimizer. So a graph is what one thread has made until one of its kernels runs, or the thread
// infers the shape of such an op, also while it traces one, or meets a node again. The first ends
// graphs that run, the others those that leave all reductions out, in branches that are not taken.
// The parts of a graph on other devices are made apart, often while it runs. So the ops that have
// an instance, one a reduction, are bound to one device in graphs (_numbered in
// gradred/tensorflow/ops.py), and hand it on as data. Functions that are not inlined are graphs of
// their own; TensorFlow runs their calls in the order of the program.
//
// Sessions of tf.compat.v1 make kernels as they are asked for. There names differ by the whole
// graph but for the copies, and numbers once given stay while kernels have them. Eager calls have
// no copies.
class Instance {
 public:
  // In the construction of a kernel. key: see Note [Names of specs].
  Instance(TF_OpKernelConstruction* construction, std::string key);
  ~Instance();

  const std::string& key() const { return key_; }
  int Number() const;          // when the kernel runs; 0 for the only copy
  std::string Suffix() const;  // "" for number 0, else "+<number>"

  // In the inference of shapes: what this thread makes from now on is of another graph than what it
  // has made.
  static void EndGraph();

 private:
  struct Graph;
  struct Sessions;

  const std::string key_;
  std::string path_;
  std::shared_ptr<Graph> graph_;  // null in eager mode
  mutable std::atomic<int> number_{-1};
};

}  // namespace gradred::tf
