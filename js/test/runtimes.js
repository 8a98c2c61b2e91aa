/** The packages of onnxruntime that the tests run on. */

export async function node() {
  return (await import("onnxruntime-node")).default;
}

export async function runtimes() {
  const web = await import("onnxruntime-web");
  web.env.wasm.numThreads = 1;
  return { "onnxruntime-node": await node(), "onnxruntime-web (wasm)": web };
}
