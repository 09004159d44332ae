// kernels.wasm against the golden digests, and how fast it is.
//
//   node kernels_test.mjs KERNELS.wasm tests/golden/kernels.txt
//
// The corpus is that of tests/tools/kernels_digest.cpp, made again here: change both.
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';

const [wasmPath, goldenPath] = process.argv.slice(2);
if (!goldenPath) {
  console.error('usage: node kernels_test.mjs KERNELS.wasm GOLDEN.txt');
  process.exit(2);
}
const { instance } = await WebAssembly.instantiate(readFileSync(wasmPath), {});
const kernels = instance.exports;

// name, ggml's number, weights and bytes of a block, where its f16 scales are
const types = [
  ['q4_0', 2, 32, 18, [0]], ['q8_0', 8, 32, 34, [0]], ['q2_K', 10, 256, 84, [80, 82]],
  ['q3_K', 11, 256, 110, [108]], ['q4_K', 12, 256, 144, [0, 2]], ['q5_K', 13, 256, 176, [0, 2]],
  ['q6_K', 14, 256, 210, [208]], ['iq4_nl', 20, 32, 18, [0]], ['iq4_xs', 23, 256, 136, [0]],
  ['mxfp4', 39, 32, 17, []], ['q5_0', 6, 32, 22, [0]],
].map(([name, number, width, bytes, scales]) => ({ name, number, width, bytes, scales }));
const shapes = [
  [256, 7, 1], [512, 5, 2], [1024, 3, 3], [3072, 4, 5], [8192, 1, 4], [2048, 3, 7], [256, 3, 65],
  [256, 2, 9], [32, 3, 2], [96, 2, 17], [2880, 5, 3], [1056, 33, 1], [512, 8, 8],
  [256, 16, 13],
];
const kinds = ['random', 'zero', 'subnormal', 'huge', 'extreme'];

let counter = 0;
function next() {
  counter = (counter + 0x9e3779b9) | 0;
  let x = counter;
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}
const any = () => next() >>> 16;

function makeScale(kind) {
  const x = any();
  switch (kind) {
    case 'zero': return x & 0x8000;
    case 'subnormal': return x & 0x83ff;
    case 'huge': return (x & 0x83ff) | 0x7800;
    default: return (x & 0x83ff) | 0x2400 | ((x & 0x0c00) >> 1);
  }
}

function makeExponent(kind) {
  const x = any();
  switch (kind) {
    case 'zero': return 0;
    case 'subnormal': return x % 4;
    case 'huge': return 240 + (x % 10);
    default: return 110 + (x % 30);
  }
}

function makeWeights(type, width, rows, kind) {
  const weights = new Uint8Array((width / type.width) * type.bytes * rows);
  for (let i = 0; i < weights.length; ++i) {
    const x = any();
    weights[i] = kind === 'extreme' ? (x % 4 ? 0xff : 0) : x;
    if (kind === 'extreme' && type.name === 'q8_0') weights[i] ^= 0x7f;
  }
  for (let b = 0; b < weights.length; b += type.bytes) {
    for (const at of type.scales) {
      const scale = makeScale(kind);
      weights[b + at] = scale;
      weights[b + at + 1] = scale >> 8;
    }
    if (type.name === 'mxfp4') weights[b] = makeExponent(kind);
  }
  return weights;
}

function makeValues(count, kind) {
  const x = new Float32Array(count);
  const factor = 2 ** (kind === 'subnormal' ? -146 : kind === 'huge' ? 50 : -15);
  for (let i = 0; i < count; ++i) {
    let sum = -131070;
    for (let k = 0; k < 4; ++k) sum += any();
    if (kind === 'zero' && (i < Math.floor(count / 2) || next() % 3)) sum = 0;
    x[i] = kind === 'extreme' ? (sum < 0 ? -3 : 3) : sum * factor;
  }
  return x;
}

const memory = (at, bytes) => new Uint8Array(kernels.memory.buffer, at, bytes);
const offsets = (at, count) => new Uint32Array(kernels.memory.buffer, at, count);

function put(array) {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  const at = kernels.kv_alloc(bytes.length);
  if (at === 0) throw new Error(`no memory for ${bytes.length} bytes`);
  memory(at, bytes.length).set(bytes);
  return at;
}

function addFloats(hash, at, count) {
  const bits = offsets(at, count).slice();
  for (let i = 0; i < count; ++i) {
    if ((bits[i] & 0x7fffffff) > 0x7f800000) bits[i] = 0x7fc00000;
  }
  hash.update(new Uint8Array(bits.buffer));
}

const parts = [];
function addPart(name, hash) {
  parts.push([name, hash.digest('hex')]);
}

// The parts of all rows, each part of all rows together, as the native program has them.
function addRows(hash, type, width, rows, activations) {
  const array = offsets(activations, 4 * rows).slice();
  const blocks = width / type.width;
  const each = (part, add) => {
    for (let r = 0; r < rows; ++r) add(array[4 * r + part]);
  };
  each(0, (at) => hash.update(memory(at, width)));
  each(1, (at) => addFloats(hash, at, blocks));
  if (type.width !== 256) return;
  each(2, (at) => hash.update(memory(at, blocks * 32)));
  each(3, (at) => hash.update(memory(at, blocks * 16)));
}

const must = (value, what) => {
  if (!value) throw new Error(`${what} was refused`);
  return value;
};

// A row of Q8_K as it travels, from one that was quantised here.
function asItTravels(row, width) {
  const [q, d, sums] = row;
  const bytes = new Uint8Array((width / 256) * 292);
  for (let b = 0; b < width / 256; ++b) {
    bytes.set(memory(d + 4 * b, 4), 292 * b);
    bytes.set(memory(q + 256 * b, 256), 292 * b + 4);
    bytes.set(memory(sums + 32 * b, 32), 292 * b + 260);
  }
  return bytes;
}

function product(type, width, weightRows, rows, weights, activations, out) {
  must(kernels.kv_dot_rows(type.number, width, weights, (width / type.width) * type.bytes,
    weightRows, activations, rows, out, weightRows), `${type.name}: kv_dot_rows`);
}

function checkTravelled(type, width, weightRows, weights, activations, out) {
  product(type, width, weightRows, 1, weights, activations, out);
  const first = memory(out, 4 * weightRows).slice();
  const bytes = put(asItTravels(offsets(activations, 4), width));
  const taken = must(kernels.kv_take_q8_k(type.number, width, 1, bytes), 'kv_take_q8_k');
  product(type, width, weightRows, 1, weights, taken, out);
  if (Buffer.compare(first, memory(out, 4 * weightRows)) !== 0) {
    throw new Error(`${type.name}: a row that travelled gives another product`);
  }
}

function addProducts() {
  const quantised = { 32: createHash('sha256'), 256: createHash('sha256') };
  for (const type of types) {
    const hash = createHash('sha256');
    for (const [width, weightRows, rows] of shapes) {
      if (width % type.width) continue;
      for (const kind of kinds) {
        const mark = kernels.kv_mark();
        const weights = put(makeWeights(type, width, weightRows, kind));
        const x = put(makeValues(width * rows, kind));
        const out = kernels.kv_alloc(4 * weightRows * rows);
        const activations = must(kernels.kv_quantise(type.number, width, rows, x), 'kv_quantise');
        addRows(quantised[type.width], type, width, rows, activations);
        product(type, width, weightRows, rows, weights, activations, out);
        addFloats(hash, out, weightRows * rows);
        if (type.width === 256 && kind === 'random') {
          checkTravelled(type, width, weightRows, weights, activations, out);
        }
        kernels.kv_release(mark);
      }
    }
    addPart(type.name, hash);
  }
  addPart('rows_q8_0', quantised[32]);
  addPart('rows_q8_K', quantised[256]);
}

function addActivations() {
  const bits = Uint32Array.from({ length: 0x10000 }, (_, i) => i * 0x10000 + (i % 97));
  const edges = [0, -0, 87, 88.25, 88.75, -87.5, -103.875, -104.125, 126.5, 133, 134, -133, -134,
    9.75, 10, -10];
  const usual = makeValues(4096, 'random');
  const count = bits.length + edges.length + usual.length;
  // As bits: a number that is not one may lose them as a float.
  const all = new Uint32Array(count);
  all.set(bits);
  all.set(new Uint32Array(Float32Array.from(edges).buffer), bits.length);
  all.set(new Uint32Array(usual.buffer), bits.length + edges.length);
  const x = put(all), g = put(makeValues(count, 'random')), y = kernels.kv_alloc(4 * count);
  const add = (name, run) => {
    run();
    const hash = createHash('sha256');
    addFloats(hash, y, count);
    addPart(name, hash);
  };
  for (const numeric of [1, 2]) {
    add(`silu:x86-v${numeric + 2}`, () => kernels.kv_silu(numeric, count, x, y));
  }
  for (const numeric of [1, 2]) {
    add(`swiglu:x86-v${numeric + 2}`, () => kernels.kv_swiglu(numeric, count, x, g, y));
  }
  add('swiglu_oai', () => kernels.kv_swiglu_oai(count, x, g, 1.702, 7, y));
  add('gelu', () => kernels.kv_gelu(count, x, 0, y));
  add('geglu', () => kernels.kv_gelu(count, x, g, y));
}

function addClasses() {
  const shared = parts.slice();
  for (const name of ['x86-v3', 'x86-v4']) {
    const hash = createHash('sha256');
    for (const [part, digest] of shared) {
      const [, numeric] = part.split(':');
      if (numeric === undefined || numeric === name) hash.update(`${part} ${digest}\n`);
    }
    addPart(name, hash);
  }
}

// Microseconds per weight row of 3072 and activation row: the best of several passes over 2 MB.
function time(type, rows) {
  const width = 3072, weightRows = 1024;
  const mark = kernels.kv_mark();
  const weights = put(makeWeights(type, width, weightRows, 'random'));
  const x = put(makeValues(width * rows, 'random'));
  const activations = kernels.kv_quantise(type.number, width, rows, x);
  const out = kernels.kv_alloc(4 * weightRows * rows);
  let best = Infinity;
  for (let pass = 0; pass < 30; ++pass) {
    const start = performance.now();
    product(type, width, weightRows, rows, weights, activations, out);
    best = Math.min(best, performance.now() - start);
  }
  kernels.kv_release(mark);
  return (best * 1000) / weightRows / rows;
}

function refusals() {
  const wrong = [
    ['kv_dot_rows of type 1', kernels.kv_dot_rows(1, 256, 0, 0, 0, 0, 0, 0, 0)],
    ['kv_dot_rows of half a block', kernels.kv_dot_rows(12, 128, 0, 0, 0, 0, 0, 0, 0)],
    ['kv_row_bytes of type 1', kernels.kv_row_bytes(1, 256)],
    ['kv_take_q8_k for Q8_0', kernels.kv_take_q8_k(8, 256, 1, 0)],
    ['kv_quantise of too much', kernels.kv_quantise(12, 0xffffff00, 0xffff, 0)],
    ['kv_alloc of all memory', kernels.kv_alloc(0xffffffff)],
  ];
  return wrong.filter(([, value]) => value !== 0).map(([what]) => `${what} was not refused`);
}

const golden = new Map(readFileSync(goldenPath, 'utf8').trim().split('\n').map((l) => l.split(' ')));
addProducts();
addActivations();
addClasses();
const failures = refusals();
for (const [part, digest] of parts) {
  if (golden.get(part) !== digest) failures.push(`${part} differs from the golden digest`);
}
for (const part of golden.keys()) {
  if (!parts.some(([name]) => name === part)) failures.push(`${part} was not computed`);
}
for (const [part, digest] of parts.slice(-2)) console.log(`wasm ${part} ${digest}`);
for (const type of types.filter(({ name }) => ['q4_K', 'q6_K', 'q8_0'].includes(name))) {
  const [one, eight] = [1, 8].map((rows) => time(type, rows).toFixed(3));
  console.log(`${type.name}: ${one} us per row of 3072, ${eight} with eight activation rows`);
}
for (const failure of failures) console.error(failure);
process.exit(failures.length === 0 ? 0 : 1);
