// The public port's page: the chat alone.

import { Announcer } from "./announce.js";
import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Key, wireKeyForm } from "./key.js";
import { Talk } from "./talk.js";

const key = new Key();
const talk = new Talk(new Api(key));

async function greet() {
  try {
    setText(byId("model"), (await talk.findModel()) ?? "no model");
    setText(byId("key-message"), key.value ? "The key works." : "");
  } catch (error) {
    setText(byId("key-message"), error.line ?? error.message);
  }
}

new Chat(talk, new Announcer(byId("announcements")));
key.onchange = greet;
wireKeyForm(byId("key-form"), key);
greet();
