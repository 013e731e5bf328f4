const digits = new Intl.NumberFormat("en-US");

export const count = (n) => digits.format(n);

export function share(part, whole) {
  const percent = whole > 0 ? (100 * part) / whole : 0;
  return `${percent.toFixed(percent > 0 && percent < 0.1 ? 3 : 1)} %`;
}

// change is the difference of two shares of a whole.
export function change(difference) {
  const points = 100 * difference;
  if (Math.abs(points) < 0.05) return "share as before";
  return `${points > 0 ? "+" : "\u2212"}${Math.abs(points).toFixed(1)} points`;
}

function scaled(n, units, step) {
  let unit = 0;
  while (n >= step && unit < units.length - 1) {
    n /= step;
    unit++;
  }
  return `${n >= 100 || Number.isInteger(n) ? Math.round(n) : n.toPrecision(3)} ${units[unit]}`;
}

export const time = (ns) => scaled(ns, ["ns", "\u00b5s", "ms", "s"], 1000);
export const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
