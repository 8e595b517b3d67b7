// Line charts and the swaps' plot, drawn as SVG; each says in words what it shows, and has its numbers as a table.

import { el, svg } from "./dom.js";
import { number } from "./table.js";

export const MARGIN = { left: 52, right: 12, top: 8, bottom: 24 };
const HEIGHT = 150;
const ROWS = 20;
const NAME_WIDTH = 36; // of a mark, with some air

export class LineChart {
  // `lines`: [{name, pick: point -> number | undefined}]; `x`: point -> number; `xText`: number -> text.
  constructor(figure, { lines, x, xText, xName, digits = 1, empty }) {
    Object.assign(this, { figure, lines, x, xText, xName, digits, empty });
    this.picture = svg("svg", { role: "img", height: HEIGHT });
    this.note = el("p", { class: "quiet" }, empty);
    this.body = el("tbody");
    const heads = [xName, ...lines.map((line) => line.name)].map((head) => el("th", { scope: "col" }, head));
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), this.body);
    this.details = el("details", {}, el("summary", {}, `As a table, the last ${ROWS}`), table);
    figure.append(this.note, this.picture, this.details);
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.points = [];
    this.marks = [];
    new ResizeObserver(() => this.#draw()).observe(figure);
  }

  update(points, marks = []) {
    this.points = points.filter((p) => this.lines.some((line) => Number.isFinite(line.pick(p))));
    this.marks = marks;
    this.#draw();
    this.#fillTable();
  }

  #draw() {
    const some = this.points.length > 1;
    this.picture.classList.toggle("gone", !some);
    this.details.hidden = !some;
    this.note.hidden = some;
    if (!some) return;
    const width = Math.max(200, this.figure.clientWidth);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const space = new Space(width, this.points.map(this.x), this.#values());
    const drawn = this.lines.map((line, at) => this.#line(space, line, at));
    this.picture.replaceChildren(...axes(space, this.xText, this.digits), ...this.#marksIn(space), ...drawn);
    this.picture.setAttribute("aria-label", this.#inWords());
  }

  #values() {
    return this.lines.flatMap((line) => this.points.map(line.pick)).filter(Number.isFinite);
  }

  #line(space, line, at) {
    const known = this.points.filter((p) => Number.isFinite(line.pick(p)));
    const path = known.map((p, i) => `${i ? "L" : "M"}${space.x(this.x(p))} ${space.y(line.pick(p))}`).join("");
    return svg("path", { d: path, class: at ? "line second" : "line" });
  }

  #marksIn(space) {
    let free = Infinity; // the marks come newest first: left of here a name has room
    return this.marks
      .filter((mark) => mark.x >= space.from && mark.x <= space.to)
      .flatMap((mark) => {
        const x = space.x(mark.x);
        const line = svg("line", { class: "mark", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
        if (x + NAME_WIDTH > free) return [line];
        free = x;
        return [line, svg("text", { x: x - 3, y: MARGIN.top + 10, "text-anchor": "end" }, mark.text)];
      });
  }

  #inWords() {
    const told = this.lines.map((line) => {
      const values = this.points.map(line.pick).filter(Number.isFinite);
      if (!values.length) return `${line.name}: nothing yet`;
      const [low, high] = [Math.min(...values), Math.max(...values)].map((v) => number(v, this.digits));
      return `${line.name}: now ${number(values.at(-1), this.digits)}, between ${low} and ${high}`;
    });
    const [first, last] = [this.points[0], this.points.at(-1)].map((p) => this.xText(this.x(p)));
    return `${told.join("; ")}. ${this.xName} from ${first} to ${last}.`;
  }

  #fillTable() {
    if (!this.details.open) return;
    const rows = this.points.slice(-ROWS).reverse().map((p) => {
      const cells = this.lines.map((line) => el("td", {}, number(line.pick(p), this.digits + 1)));
      return el("tr", {}, el("th", { scope: "row" }, this.xText(this.x(p))), ...cells);
    });
    this.body.replaceChildren(...rows);
  }
}

// From data to pixels.
class Space {
  constructor(width, xs, ys) {
    this.width = width;
    this.from = Math.min(...xs);
    this.to = Math.max(...xs);
    this.low = Math.min(0, ...ys);
    this.high = Math.max(0, ...ys);
    this.wide = this.to - this.from || 1; // what does not vary is drawn at one end
    this.tall = this.high - this.low || 1;
  }

  x(value) {
    return round(MARGIN.left + ((value - this.from) / this.wide) * (this.width - MARGIN.left - MARGIN.right));
  }

  y(value) {
    const room = HEIGHT - MARGIN.top - MARGIN.bottom;
    return round(MARGIN.top + (1 - (value - this.low) / this.tall) * room);
  }
}

function axes(space, xText, digits) {
  const bottom = HEIGHT - MARGIN.bottom;
  const right = space.width - MARGIN.right;
  const values = [space.low, (space.low + space.high) / 2, space.high];
  return [
    ...values.flatMap((value) => [
      svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: space.y(value), y2: space.y(value) }),
      svg("text", { x: MARGIN.left - 6, y: space.y(value) + 4, "text-anchor": "end" }, number(value, digits)),
    ]),
    svg("text", { x: MARGIN.left, y: bottom + 18 }, xText(space.from)),
    svg("text", { x: right, y: bottom + 18, "text-anchor": "end" }, xText(space.to)),
  ];
}

function round(value) {
  return Math.round(value * 10) / 10;
}

export { HEIGHT, round };
