/** Pictures of digits: from a drawing to what the network takes, and small changes of them. */

export const SIZE = 20;
const BOX = 16; // the square in the picture that a digit fills

/** The drawing as the network takes it: cut out, scaled, in the middle; null if it is empty. */
export function prepared(canvas) {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const ink = (x, y) => data[4 * (y * width + x)];
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (ink(x, y) < 32) continue;
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
    }
  }
  if (right < 0) return null;
  // A dot is not made as large as a digit.
  const extent = Math.max(right - left, bottom - top, 60) + 1;
  const small = new OffscreenCanvas(SIZE, SIZE);
  const context = small.getContext("2d", { willReadFrequently: true });
  context.fillRect(0, 0, SIZE, SIZE);
  context.imageSmoothingQuality = "high";
  const scale = BOX / extent;
  const [w, h] = [right - left + 1, bottom - top + 1];
  context.drawImage(
    canvas,
    left,
    top,
    w,
    h,
    (SIZE - w * scale) / 2,
    (SIZE - h * scale) / 2,
    w * scale,
    h * scale,
  );
  const pixels = context.getImageData(0, 0, SIZE, SIZE).data;
  return Float32Array.from({ length: SIZE * SIZE }, (_, i) => pixels[4 * i] / 255);
}

/** A picture turned, scaled and shifted a little, as handwriting varies. */
export function varied(picture, random = Math.random) {
  const angle = (random() - 0.5) * 0.3;
  const scale = 0.9 + 0.2 * random();
  const [dx, dy] = [(random() - 0.5) * 3, (random() - 0.5) * 3];
  const [cos, sin] = [Math.cos(angle) / scale, Math.sin(angle) / scale];
  const middle = (SIZE - 1) / 2;
  const at = (x, y) => (x < 0 || y < 0 || x >= SIZE || y >= SIZE ? 0 : picture[y * SIZE + x]);
  return Float32Array.from({ length: SIZE * SIZE }, (_, i) => {
    const [u, v] = [(i % SIZE) - middle - dx, Math.floor(i / SIZE) - middle - dy];
    const [x, y] = [cos * u + sin * v + middle, cos * v - sin * u + middle];
    const [x0, y0] = [Math.floor(x), Math.floor(y)];
    const [fx, fy] = [x - x0, y - y0];
    return (
      at(x0, y0) * (1 - fx) * (1 - fy) +
      at(x0 + 1, y0) * fx * (1 - fy) +
      at(x0, y0 + 1) * (1 - fx) * fy +
      at(x0 + 1, y0 + 1) * fx * fy
    );
  });
}

/** Many pictures in one array, as a batch. */
export function stacked(pictures) {
  const batch = new Float32Array(pictures.length * SIZE * SIZE);
  pictures.forEach((picture, i) => batch.set(picture, i * SIZE * SIZE));
  return { data: batch, dims: [pictures.length, 1, SIZE, SIZE] };
}

/** The printed digits that come with the model: 0 to 9, again and again. */
export function printedDigits(bytes) {
  return Array.from({ length: bytes.length / (SIZE * SIZE) }, (_, i) => ({
    picture: Float32Array.from(
      bytes.subarray(i * SIZE * SIZE, (i + 1) * SIZE * SIZE),
      (v) => v / 255,
    ),
    label: i % 10,
  }));
}

/** A picture as an image that can be shown. */
export function imageOf(picture) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIZE;
  const context = canvas.getContext("2d");
  const image = context.createImageData(SIZE, SIZE);
  picture.forEach((value, i) =>
    image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i),
  );
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

/** Shares of one from scores. */
export function softmax(scores) {
  const top = Math.max(...scores);
  const powers = Array.from(scores, (score) => Math.exp(score - top));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}
