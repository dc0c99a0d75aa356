// Print the pages that the site's own search finds: node site_search.js INDEX WORKER SEARCH ... (JSON, best first).
const [index, worker, ...searches] = process.argv.slice(2);
const fs = require("fs");

// The search runs in a web worker; this is the part of a worker's interface that it uses.
const replies = [];
let receive = null;
globalThis.self = globalThis;
globalThis.postMessage = message => replies.push(message);
globalThis.addEventListener = (kind, listener) => { if (kind === "message") receive = listener; };
globalThis.importScripts = () => {};
globalThis.location = { href: "http://localhost/" };
require("vm").runInThisContext(fs.readFileSync(worker, "utf8"));

const SETUP = 0, QUERY = 2;
(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await receive({ data: { type: SETUP, data: { config, docs, options: { suggest: false } } } });
  const found = {};
  for (const words of searches) {
    await receive({ data: { type: QUERY, data: words } });
    found[words] = replies.at(-1).data.items.map(([page]) => page.location);
  }
  console.log(JSON.stringify(found));
})();
