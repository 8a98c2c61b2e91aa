// Errors inside of the library. None of them crosses its border: there, each becomes a status.
#pragma once

#include <stdexcept>
#include <string>

namespace onnxtrain::device {

// An error with a sentence for the user: what happened, where, what to do.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A checkpoint that cannot be read or written.
struct CheckpointError : Error {
  using Error::Error;
};

// The operating system does not let a file be read or written.
struct UnreadableError : CheckpointError {
  using CheckpointError::CheckpointError;
};

// The external data of a checkpoint are not there; a writer may be about to rename them.
struct CheckpointDataError : CheckpointError {
  using CheckpointError::CheckpointError;
};

// An adapter that cannot be read or written, or does not fit the session.
struct AdapterError : Error {
  using Error::Error;
};

// A graph that cannot be used.
struct ModelError : Error {
  using Error::Error;
};

// A wrong argument, or a wrong input of a graph.
struct ArgumentError : Error {
  using Error::Error;
};

// Something that cannot be done now.
struct StateError : Error {
  using Error::Error;
};

// Something that upstream's interface has, and this library does not.
struct NotImplementedError : Error {
  using Error::Error;
};

// What the operating system reports; it becomes one of those above, with the name of the file.
struct OsError : std::runtime_error {
  explicit OsError(int code);
  OsError(int code, const std::string& reason) : std::runtime_error(reason), code(code) {}
  int code;
};

}  // namespace onnxtrain::device
