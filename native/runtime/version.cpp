// The version of the package, which both libraries have.
extern "C" __attribute__((visibility("default"))) const char* onnxtrain_version() { return ONNXTRAIN_VERSION; }
