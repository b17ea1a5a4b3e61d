// What is used of MPI, once, as tables: mpi_abi.h makes types of them,
// tests/native/mpi_abi_check.cpp compares them with a real mpi.h, which nothing else needs. To use
// one more function or constant of MPI, add its row here.
#pragma once

// Kinds of handles: X(kind).
#define GRADRED_MPI_KINDS(X) X(Comm) X(Datatype) X(Errhandler) X(Group) X(Op) X(Request)

// Predefined handles: X(kind, name here, name in MPI, symbol of Open MPI, value in the MPICH ABI,
// value in the standard ABI).
#define GRADRED_MPI_HANDLES(X)                                                                 \
  X(Comm, comm_null, MPI_COMM_NULL, "ompi_mpi_comm_null", 0x04000000, 0x100)                   \
  X(Comm, comm_world, MPI_COMM_WORLD, "ompi_mpi_comm_world", 0x44000000, 0x101)                \
  X(Comm, comm_self, MPI_COMM_SELF, "ompi_mpi_comm_self", 0x44000001, 0x102)                   \
  X(Datatype, byte, MPI_BYTE, "ompi_mpi_byte", 0x4c00010d, 0x247)                              \
  X(Datatype, uint8, MPI_UINT8_T, "ompi_mpi_uint8_t", 0x4c00013b, 0x241)                       \
  X(Datatype, uint16, MPI_UINT16_T, "ompi_mpi_uint16_t", 0x4c00023c, 0x249)                    \
  X(Datatype, uint32, MPI_UINT32_T, "ompi_mpi_uint32_t", 0x4c00043d, 0x251)                    \
  X(Datatype, uint64, MPI_UINT64_T, "ompi_mpi_uint64_t", 0x4c00083e, 0x259)                    \
  X(Datatype, int8, MPI_INT8_T, "ompi_mpi_int8_t", 0x4c000137, 0x240)                          \
  X(Datatype, int16, MPI_INT16_T, "ompi_mpi_int16_t", 0x4c000238, 0x248)                       \
  X(Datatype, int32, MPI_INT32_T, "ompi_mpi_int32_t", 0x4c000439, 0x250)                       \
  X(Datatype, int64, MPI_INT64_T, "ompi_mpi_int64_t", 0x4c00083a, 0x258)                       \
  X(Datatype, float32, MPI_FLOAT, "ompi_mpi_float", 0x4c00040a, 0x210)                         \
  X(Datatype, float64, MPI_DOUBLE, "ompi_mpi_double", 0x4c00080b, 0x214)                       \
  X(Op, sum, MPI_SUM, "ompi_mpi_op_sum", 0x58000003, 0x21)                                     \
  X(Op, min, MPI_MIN, "ompi_mpi_op_min", 0x58000002, 0x22)                                     \
  X(Op, max, MPI_MAX, "ompi_mpi_op_max", 0x58000001, 0x23)                                     \
  X(Op, product, MPI_PROD, "ompi_mpi_op_prod", 0x58000004, 0x24)                               \
  X(Errhandler, errors_return, MPI_ERRORS_RETURN, "ompi_mpi_errors_return", 0x54000001, 0x143) \
  X(Request, request_null, MPI_REQUEST_NULL, "ompi_request_null", 0x2c000000, 0x180)

// Integers: X(name here, name in MPI, Open MPI, MPICH ABI, standard ABI).
#define GRADRED_MPI_INTEGERS(X)                           \
  X(kSuccess, MPI_SUCCESS, 0, 0, 0)                       \
  X(kErrTruncate, MPI_ERR_TRUNCATE, 15, 14, 15)           \
  X(kMaxErrorString, MPI_MAX_ERROR_STRING, 256, 512, 512) \
  X(kAnySource, MPI_ANY_SOURCE, -1, -2, -1)               \
  X(kTagUb, MPI_TAG_UB, 0, 0x64400001, 501)               \
  X(kThreadSingle, MPI_THREAD_SINGLE, 0, 0, 0)            \
  X(kThreadFunneled, MPI_THREAD_FUNNELED, 1, 1, 1024)     \
  X(kThreadSerialized, MPI_THREAD_SERIALIZED, 2, 2, 2048) \
  X(kThreadMultiple, MPI_THREAD_MULTIPLE, 3, 3, 4096)

// Addresses that stand for something, as numbers: X(type, name here, name in MPI, Open MPI, MPICH
// ABI, standard ABI).
#define GRADRED_MPI_ADDRESSES(X)                       \
  X(Status, status_ignore, MPI_STATUS_IGNORE, 0, 1, 0) \
  X(void, in_place, MPI_IN_PLACE, 1, UINTPTR_MAX, 1)

// Functions: X(name after MPI_, parameter types). All are in every library that has MPI 3.0.
#define GRADRED_MPI_FUNCTIONS(X)                                         \
  X(Get_library_version, (char*, int*))                                  \
  X(Init_thread, (int*, char***, int, int*))                             \
  X(Query_thread, (int*))                                                \
  X(Initialized, (int*))                                                 \
  X(Finalized, (int*))                                                   \
  X(Finalize, ())                                                        \
  X(Error_class, (int, int*))                                            \
  X(Error_string, (int, char*, int*))                                    \
  X(Comm_rank, (Comm, int*))                                             \
  X(Comm_size, (Comm, int*))                                             \
  X(Comm_test_inter, (Comm, int*))                                       \
  X(Comm_get_attr, (Comm, int, void*, int*))                             \
  X(Comm_set_errhandler, (Comm, Errhandler))                             \
  X(Comm_dup, (Comm, Comm*))                                             \
  X(Comm_free, (Comm*))                                                  \
  X(Comm_group, (Comm, Group*))                                          \
  X(Comm_create_group, (Comm, Group, int, Comm*))                        \
  X(Group_incl, (Group, int, const int*, Group*))                        \
  X(Group_free, (Group*))                                                \
  X(Isend, (const void*, int, Datatype, int, int, Comm, Request*))       \
  X(Issend, (const void*, int, Datatype, int, int, Comm, Request*))      \
  X(Irecv, (void*, int, Datatype, int, int, Comm, Request*))             \
  X(Iprobe, (int, int, Comm, int*, Status*))                             \
  X(Test, (Request*, int*, Status*))                                     \
  X(Get_count, (const Status*, Datatype, int*))                          \
  X(Ibarrier, (Comm, Request*))                                          \
  X(Iallreduce, (const void*, void*, int, Datatype, Op, Comm, Request*)) \
  X(Allgather, (const void*, int, Datatype, void*, int, Datatype, Comm)) \
  X(Allgatherv, (const void*, int, Datatype, void*, const int*, const int*, Datatype, Comm))
