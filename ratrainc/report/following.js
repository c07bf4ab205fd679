// Reports that are compared: what one shows and chooses the other shows too, on axes that both have in common.
"use strict";

let said = ""; // the choice that the others know
let turn = 0; // of the choice that is followed
let following = 1; // how many choices of others are being followed: the first is that of the address

// What is shown and chosen, in words that hold in another report: seconds of the step, names of ops and tensors.
function choiceInWords() {
  const { view, stage, memory, lanes, path, from, to, low, high, time, chosen } = state, zero = FACTS.views[view].start;
  const named = chosen?.stage === stage ? chosenWords(chosen) : null;
  return { view, stage, memory, lanes, path, from: from - zero, to: to - zero, low, high, time: time === null ? null : time - zero, named };
}

// Called with each drawing: where that shows a choice made here, the address and the others get it.
function tellPeers() {
  const words = choiceInWords(), text = JSON.stringify(words);
  if (text === said) return;
  said = text;
  if (following) return;
  writeAddress();
  for (const peer of PEERS) peer.adopt(words);
}

async function adopt(words) {
  const mine = ++turn, zero = FACTS.views[words.view].start, stage = Math.min(words.stage, FACTS.stages.length - 1);
  following++;
  try {
    Object.assign(state, { view: words.view, stage, memory: words.memory, lanes: words.lanes, path: words.path, time: words.time === null ? null : zero + words.time });
    if (stage === words.stage) Object.assign(state, { low: words.low, high: words.high });
    else wholeAddresses(stage);
    state.asked = words.stage;
    setRange(zero + words.from, zero + words.to);
    state.chosen = null;
    await refresh();
    if (mine !== turn) return;
    if (words.named && stage === words.stage) state.chosen = await hitNamed(stage, words.named);
    draw();
    tellWhere(words, stage);
  } finally {
    following--;
  }
}

// What is there of another's choice, beside the search.
function tellWhere(words, stage) {
  found.at = found.hits.findIndex((hit) => hit.stage === stage && hit.op === state.chosen?.op && hit.tensor === state.chosen?.tensor);
  tellPlace();
  if (stage !== words.stage) at("count").textContent = `no stage @${words.stage} here: @${stage} is shown`;
  else if (words.named && !state.chosen) at("count").textContent = absent(stage, words.named);
  else if (!found.text.trim()) at("count").textContent = "";
}

// The search of another report, here too; its list opens where it is asked for.
async function follow(text) {
  if (found.text === text) return;
  at("search").value = text;
  await search(text).catch(complain);
  at("matches").hidden = true;
}

at("search").addEventListener("focus", () => { at("matches").hidden = !found.hits.length; });

started.then(() => {
  following--;
  document.documentElement.dataset.paintedMs = performance.now().toFixed(0);
});
ME.adopt = (words) => adopt(words).catch(complain);
ME.follow = follow;
Object.assign(ME, { state, started, choiceInWords, hits: () => found.hits.map(hitText), shown: () => shown, dataset: at("charts").dataset });
