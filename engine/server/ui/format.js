// Numbers for people.

const COUNT = new Intl.NumberFormat("en");
const SHARE = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 0 });
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 12345 -> "12,345". */
export const count = (value) => COUNT.format(value);

/** 0.5 -> "50%". */
export const share = (value) => SHARE.format(value);

/** "1 block", "2 blocks". */
export const many = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Two figures or all before the point: 3.42 -> "3.4", 23.4 -> "23", 1234.5 -> "1,235", 0 -> "0". */
export const figure = (value) => count(value >= 9.95 ? Math.round(value) : Math.round(10 * value) / 10);

/** Bytes -> "1.5 MiB". */
export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < SIZES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : figure(value)} ${SIZES[unit]}`;
}

/** Seconds -> "8 s", "3 min", "2 h", "5 d". */
export function span(seconds) {
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 99.5 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Seconds, short ones too: 0.042 -> "42 ms", 1.234 -> "1.2 s". */
export const brief = (seconds) => (seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : `${figure(seconds)} s`);

/** A text on one line, with what cannot be seen made visible. */
export const oneLine = (text) => text.replace(/\r?\n/g, "↵").replace(/[\u0000-\u001f\u007f-\u009f]/g, "·");
