/** Drawing on a canvas with mouse, finger, pen or keyboard. */

const WIDTH = 20;
const STEP = 10;

export class Pad {
  #context;
  #last = null;
  #cursor = { x: 140, y: 140 };
  #isDown = false;

  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.#context = canvas.getContext("2d", { willReadFrequently: true });
    this.#erase();
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.#last = this.#place(event);
      this.#stroke(this.#last);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.#last) return;
      for (const each of event.getCoalescedEvents?.() ?? [event]) this.#stroke(this.#place(each));
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => {
        if (this.#last) this.changed();
        this.#last = null;
      });
    }
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.#erase();
    this.#isDown = false;
    this.changed();
  }

  #erase() {
    this.#context.fillStyle = "#000";
    this.#context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * this.canvas.width,
      y: ((event.clientY - box.top) / box.height) * this.canvas.height,
    };
  }

  #stroke(to) {
    const context = this.#context;
    Object.assign(context, {
      strokeStyle: "#fff",
      lineWidth: WIDTH,
      lineCap: "round",
      lineJoin: "round",
    });
    context.beginPath();
    context.moveTo(this.#last.x, this.#last.y);
    context.lineTo(to.x, to.y);
    context.stroke();
    this.#last = to;
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") this.clear();
    else if (event.key === " ") {
      this.#isDown = !this.#isDown;
      if (this.#isDown) this.#dot();
    } else if (moves[event.key]) {
      const [dx, dy] = moves[event.key];
      const from = { ...this.#cursor };
      const clamp = (value) => Math.min(270, Math.max(10, value));
      this.#cursor = { x: clamp(from.x + dx * STEP), y: clamp(from.y + dy * STEP) };
      if (this.#isDown) {
        this.#last = from;
        this.#stroke(this.#cursor);
        this.#last = null;
        this.changed();
      }
    } else return;
    event.preventDefault();
  }

  #dot() {
    this.#last = this.#cursor;
    this.#stroke({ ...this.#cursor });
    this.#last = null;
    this.changed();
  }
}
