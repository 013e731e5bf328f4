// The data of the page: stacks as a table of nodes, each with its parent and frame, and
// samples that say what the faults at a node cost. See AppendFlame for its making.

const frameSize = 6; // name, file, line, module, language, inlined
const sampleSize = 6; // node, kind, major, faults, time, bytes

const noStack = "[no stack]"; // aggregate.NoStack

export const faults = 0;
export const major = 3; // beside faults, time and bytes

export class Profile {
  constructor(data) {
    this.runs = data.runs;
    this.kinds = data.kinds;
    this.languages = data.languages;
    this.colours = data.colours;
    this.strings = data.strings;
    this.frames = data.frames;
    this.nodes = data.nodes;
    this.samples = data.samples;
    this.count = data.nodes.length / 2 + 1;
    this.stackless = this.findStackless();
  }

  // findStackless is the node of faults without a stack, -1 if all have one.
  findStackless() {
    for (let node = 1; node < this.count; node++) {
      const frame = this.nodes[2 * (node - 1) + 1] * frameSize;
      if (this.nodes[2 * (node - 1)] === 0 && this.strings[this.frames[frame]] === noStack) return node;
    }
    return -1;
  }

  frame(index) {
    if (index < 0) return { name: "all", file: "", line: 0, module: "", language: "", inlined: false };
    const at = index * frameSize;
    const [name, file, line, module, language, inlined] = this.frames.slice(at, at + frameSize);
    const text = (i) => this.strings[i];
    return {
      name: text(name), file: text(file), line, module: text(module),
      language: this.languages[language], inlined: inlined === 1,
    };
  }

  // kindTotals are the faults of each kind in the run, of all kinds that it or the other has.
  kindTotals() {
    const totals = new Map();
    for (const samples of this.samples) {
      for (let i = 0; i < samples.length; i += sampleSize) {
        const more = samples === this.samples[0] ? samples[i + 3] : 0;
        totals.set(samples[i + 1], (totals.get(samples[i + 1]) ?? 0) + more);
      }
    }
    return totals;
  }

  colour(language) {
    return this.colours[Math.max(this.languages.indexOf(language), 0)];
  }

  // usedLanguages are those of all frames, in the order of their numbers.
  usedLanguages() {
    const used = new Set();
    for (let i = 4; i < this.frames.length; i += frameSize) used.add(this.frames[i]);
    return [...used].sort((a, b) => a - b).map((language) => this.languages[language]);
  }

  totals(samples) {
    const sums = [0, 0, 0];
    for (let i = 0; i < samples.length; i += sampleSize) {
      for (let v = 0; v < 3; v++) sums[v] += samples[i + 3 + v];
    }
    return sums;
  }

  // costs adds up, for each node, what is at and above it of the kinds that are wanted.
  costs(samples, wanted) {
    const own = [];
    const sums = [];
    for (let v = 0; v <= major; v++) {
      own.push(new Float64Array(this.count));
      sums.push(new Float64Array(this.count));
    }
    for (let i = 0; i < samples.length; i += sampleSize) {
      const [node, kind, isMajor] = [samples[i], samples[i + 1], samples[i + 2]];
      if (!wanted.kinds.has(kind) || (wanted.major && !isMajor)) continue;
      if (!wanted.stackless && node === this.stackless) continue;
      for (let v = 0; v < 3; v++) own[v][node] += samples[i + 3 + v];
      if (isMajor) own[major][node] += samples[i + 3];
    }
    for (let v = 0; v <= major; v++) {
      sums[v].set(own[v]);
      for (let node = this.count - 1; node > 0; node--) {
        sums[v][this.nodes[2 * (node - 1)]] += sums[v][node];
      }
    }
    return { own, sums };
  }

  // places gives frames that differ in the line alone one number.
  places() {
    if (this.placeOf) return this.placeOf;
    const numbers = new Map();
    this.placeOf = new Int32Array(this.frames.length / frameSize);
    for (let f = 0; f < this.placeOf.length; f++) {
      const at = f * frameSize;
      const [name, file, , module, language, inlined] = this.frames.slice(at, at + frameSize);
      const key = [name, file, module, language, inlined].join();
      if (!numbers.has(key)) numbers.set(key, f);
      this.placeOf[f] = numbers.get(key);
    }
    return this.placeOf;
  }

  // tree is what is drawn: objects with a name, a value and children, sorted by name. Each
  // also has runs: for each run its costs and those that are its own.
  tree(wanted) {
    const costs = this.samples.map((samples) => this.costs(samples, wanted));
    const shown = costs[Math.min(wanted.widths, costs.length - 1)];
    const places = wanted.lines ? null : this.places();
    const objects = new Array(this.count);
    const merged = new Map();
    for (let node = 0; node < this.count; node++) {
      if (node > 0 && shown.sums[wanted.value][node] === 0) continue;
      const parent = node > 0 ? objects[this.nodes[2 * (node - 1)]] : null;
      const frame = node > 0 ? this.nodes[2 * (node - 1) + 1] : -1;
      let object;
      if (places && parent) {
        const key = parent.node * places.length + places[frame];
        object = merged.get(key);
        if (!object) merged.set(key, (object = this.object(node, frame, costs.length, false)));
      } else {
        object = this.object(node, frame, costs.length, true);
      }
      objects[node] = object;
      object.value += shown.sums[wanted.value][node];
      for (let run = 0; run < costs.length; run++) {
        for (let v = 0; v <= major; v++) {
          object.runs[run].sums[v] += costs[run].sums[v][node];
          object.runs[run].own[v] += costs[run].own[v][node];
        }
      }
      if (parent && !object.placed) {
        object.placed = true;
        parent.children.push(object);
      }
    }
    for (const object of new Set(objects)) {
      object?.children.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
    }
    return objects[0];
  }

  object(node, index, runs, withLine) {
    const frame = this.frame(index);
    let name = frame.name;
    if (frame.file) {
      name += ` ${base(frame.file)}`;
      if (withLine && frame.line) name += `:${frame.line}`;
    }
    if (!withLine) frame.line = 0;
    const costs = () => ({ sums: [0, 0, 0, 0], own: [0, 0, 0, 0] });
    return { name, frame, node, value: 0, children: [], runs: Array.from({ length: runs }, costs) };
  }
}

export const base = (path) => path.slice(path.lastIndexOf("/") + 1);
