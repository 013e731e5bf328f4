const more = [214, 94, 0]; // vermilion
const less = [0, 114, 178]; // blue
const same = [222, 223, 226];

const mix = (from, to, weight) =>
  `rgb(${from.map((c, i) => Math.round(c + (to[i] - c) * weight)).join(",")})`;

const components = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// shade makes neighbours of one language differ a little, the same name always alike.
function shade(name) {
  let hash = 2166136261;
  for (let i = 0; i < name.length && i < 64; i++) {
    hash = Math.imul(hash ^ name.charCodeAt(i), 16777619);
  }
  return ((hash >>> 8) & 0xff) / 255;
}

export function languageColour(colour, name) {
  return mix(components(colour), [255, 255, 255], name === undefined ? 0 : 0.34 * shade(name));
}

// changeColour shows by how much a share of the whole has grown: full colour from a tenth on.
export function changeColour(change) {
  const weight = Math.min(Math.sqrt(Math.abs(change) / 0.1), 1) * 0.75;
  return mix(same, change > 0 ? more : less, weight);
}

export const matchColour = "#6b2fa0";
