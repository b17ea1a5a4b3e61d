// Which copy of a reduction in a graph a kernel belongs to.
#pragma once

#include <string>

#include "tf_api.h"

namespace gradred::tf {

// Note [Instances]
// A function that reduces may be called several times in one graph. TensorFlow puts a copy of its
// body at each call, all with one domain, and does not order the copies unless they write
// variables. So ranks may reach them in different orders: each copy must be a domain of its own.
// Copies differ by the path of their nodes. The first path of a domain keeps the domain's name; the
// others are numbered in the order of their names, which is alike on all ranks. All kernels of a
// graph exist before the first of them runs, and numbers once given stay.
class Instance {
 public:
  // In the construction of a kernel.
  Instance(TF_OpKernelConstruction* construction, std::string domain);

  const std::string& domain() const { return domain_; }
  int Number() const;          // when the kernel runs; 0 for the only copy
  std::string Suffix() const;  // "" for number 0, else "+<number>"

 private:
  const std::string domain_, path_;
};

}  // namespace gradred::tf
